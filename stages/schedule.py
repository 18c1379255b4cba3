"""Choose K by the number of requests in flight for every row that can change it.

Reads    reports/predicted.json         speed-ups by K and load
Metrics  reports/schedule.json          ranges of requests with their K, or why there are none
Params   methods

Run      dvc repro schedule
"""

from specmill import paths
from specmill.files import read_json
from specmill.schedule import schedules
from specmill.stage import open_stage


def main() -> None:
    """Run the stage."""
    with open_stage("schedule", ["methods"]) as stage:
        predicted = read_json(paths.REPORTS / "predicted.json")
        found = schedules(predicted, stage.params.methods)
        stage.write_metrics(paths.REPORTS / "schedule.json", found)


if __name__ == "__main__":
    main()
