"""One file per DVC stage, each run as `python -m stages.NAME`."""
