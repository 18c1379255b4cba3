"""Where the repository keeps things; relative to the working directory, which DVC sets.

Everything under CACHE survives an interrupted stage. It is anchored at DVC_ROOT, so that
`dvc exp run --temp` and the queue, which run in a copy of the repository, share it.
"""

import os
from pathlib import Path

PARAMS = Path("params.yaml")
DECISIONS = Path("decisions.yaml")
HARDWARE = Path("reports/hardware.json")
SOURCES = Path("reports/sources.json")
HEAD_SOURCES = Path("reports/head_sources.json")
DRAFT_SOURCE = Path("reports/draft_source.json")
START_SOURCE = Path("reports/start_source.json")
IMPORTED_SOURCES = Path("reports/imported_sources.json")
CURVE_KINDS = Path("reports/curve_kinds.json")

VERIFIER = Path("models/verifier")
IDENTITY = VERIFIER / "identity.json"
VERIFIER_HEAD = Path("data/verifier_head")
HEAD_IDENTITY = VERIFIER_HEAD / "identity.json"

PREPARED = Path("data/prepared")
HIDDEN_STATES = Path("data/hidden_states")
BENCH_STATES = Path("data/bench_states")
VOCAB = Path("data/vocab")
START = VOCAB / "head"
EAGLE3 = Path("models/eagle3")
SIBLINGS = Path("models/siblings")
MEDUSA = Path("models/medusa")
DRAFT = Path("models/draft")
HEADS = Path("models/heads")

REPORTS = Path("reports")
BENCH = REPORTS / "bench"
SAMPLING = Path("reports/sampling")
DECISION = REPORTS / "decision.json"
CURVES = REPORTS / "curves.json"
BENCH_RAW = Path("data/bench")
REPLAY = Path("data/replay")

ROOT = Path(os.environ.get("DVC_ROOT", ".")).absolute()
CACHE = ROOT / ".cache"
STORE = CACHE / "hidden_states"
STAGING = CACHE / "staging"
