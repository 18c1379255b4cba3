"""Check what the experiment reads from outside, and write down its content.

Reads    the datasets of params.prepare; that the verifier's source is there
Writes   reports/sources.json         each dataset as asked for, with the digest of a local one
         reports/head_sources.json    the same of every head from elsewhere
         reports/draft_source.json    the shape of the draft model
         reports/start_source.json    the head that training starts from
         reports/imported_sources.json    and of every result of another tool
         reports/curve_kinds.json     which kinds of draft `methods` has (specmill.curve_kinds)
Params   read but not tracked: this stage runs always, and its output is compared by content

Run      dvc repro sources
"""

import sys

from specmill import paths
from specmill.curve_kinds import kinds_to_measure
from specmill.draft_sources import check_shape, identify_draft, identify_start
from specmill.files import write_json
from specmill.imported import identify_imported
from specmill.methods import check_methods
from specmill.params_file import load_params
from specmill.sources import check_readable, identify, identify_head
from specmill.stage import show_help
from specmill.verifier import check_source, check_unchanged


def main() -> None:
    """Run the stage; without an MLflow run, since it measures nothing."""
    show_help()
    try:
        params = load_params(paths.PARAMS)
        check_source(params.verifier.source)
        check_unchanged(params.verifier.source, paths.VERIFIER)
        check_methods(params)
        check_shape(params)
        prepare = params.prepare
        for dataset in (*prepare.dataset, *prepare.bench):
            check_readable(dataset, prepare.max_rows, strict=prepare.strict)
        datasets = {
            name: [identify(dataset) for dataset in listed]
            for name, listed in (
                ("dataset", params.prepare.dataset),
                ("bench", params.prepare.bench),
            )
        }
        write_json(paths.SOURCES, datasets)
        # a file of its own: another head must not answer the prompts again
        heads = {name: identify_head(head) for name, head in params.heads.items()}
        write_json(paths.HEAD_SOURCES, heads)
        write_json(paths.DRAFT_SOURCE, identify_draft(params.train.draft))
        size = params.vocab.draft_vocab_size
        write_json(paths.START_SOURCE, identify_start(params.train, size))
        imported = {
            name: identify_imported(f"imported.{name}", row)
            for name, row in params.imported.items()
        }
        write_json(paths.IMPORTED_SOURCES, imported)
        # not the sections that they follow from: a window of one row measures no step time again
        write_json(paths.CURVE_KINDS, kinds_to_measure(params))
    except (ValueError, OSError) as error:
        sys.exit(f"sources: {error}")


if __name__ == "__main__":
    main()
