"""Put a complete params file in place of params.yaml.

Run      python -m specmill.profile profiles/smoke.yaml      (make repro PARAMS=...)
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from specmill import paths
from specmill.params_file import load_params


def use_profile(profile: Path, params: Path) -> None:
    """Copy `profile` onto `params`.

    Raises:
        ValueError: when the profile is not valid, or `params` has changes that are in no commit
            and would be lost.
    """
    load_params(profile)
    if params.exists() and params.read_bytes() == profile.read_bytes():
        return
    status = subprocess.run(
        ["git", "status", "--porcelain", "--", str(params)],
        capture_output=True,
        text=True,
        check=False,
    )
    if status.returncode != 0:
        raise ValueError(f"git cannot tell whether {params} is committed: {status.stderr.strip()}")
    if status.stdout.strip():
        raise ValueError(
            f"{params} has changes that are not committed and that {profile} would overwrite; "
            f"commit them or `git restore {params}`"
        )
    shutil.copyfile(profile, params)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m specmill.profile", description="Copy a profile onto params.yaml."
    )
    parser.add_argument("profile", type=Path, help="a complete params file")
    chosen = parser.parse_args().profile
    try:
        use_profile(chosen, paths.PARAMS)
    except (ValueError, OSError) as error:
        sys.exit(f"PARAMS={chosen}: {error}")
