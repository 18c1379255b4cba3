"""What holds for every test."""

import os

# before MLflow is imported: it opens its telemetry then
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "true"
