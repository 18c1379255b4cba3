"""What is known not to work between versions of vLLM, speculators and classes of models.

Beside compat.py, which is what the pipeline depends on: nothing here can change a result. Errors
are matched by their words, since that is all an engine's log has.
"""

import re

RENDERING = ["--enable-scale-out"]
"""Server flags without which vLLM 0.32 answers every request to render with 403; speculators'
`prepare-data` then drops every conversation and goes on."""

TEXT_ALONE = ["--language-model-only"]
"""Server flags with which a wrapper is served without its other towers, whose processors want the
verifier's own tokenizer."""

_KNOWN = (
    (
        r"does not support EAGLE3 interface",
        "vLLM's model of this class hands out no aux hidden states (it is no SupportsEagle3): no "
        "EAGLE-3, P-EAGLE or DFlash head can be trained or served with this version. Set "
        "extract.mode to online, which extracts nothing, and compare none, ngram, suffix or a "
        "draft model",
    ),
    (
        r"2-argument constructor signature|Connector\.__init__\(\)|\(specmill/connector\.py\) |"
        r"does not support HMA",
        "vLLM makes KV connectors in another way than specmill.connector expects: its constructor, "
        "or what hybrid caches ask of it, differs from vLLM 0.32 and 0.26",
    ),
    (
        r"pin_memory=True requires a CUDA",
        "the KV connector that is used is vLLM's own example, which needs a GPU; "
        "specmill.connector does without",
    ),
    (
        r"Scale-out endpoints are disabled|answered 403",
        f"the server was started without {RENDERING[0]}: vLLM 0.32 renders for nobody then, and "
        "speculators' prepare-data drops every conversation",
    ),
    (
        r"hands no hidden states out",
        "vLLM answers without kv_transfer_params: requests do not reach the KV connector",
    ),
    (
        r"computed other token ids than were sent",
        "ids that the connector hands back are not those that were asked for: vLLM has cut or "
        "changed the prompt",
    ),
    (
        r"no module or parameter named|weights were not initialized|has no place for|"
        r"KeyError: '[\w.]*layers\.",
        "vLLM does not find the tensors under the names that the checkpoint has: another nesting, "
        "or a key of config.json by which it makes other layers than transformers",
    ),
    (
        r"failed to be inspected",
        "vLLM cannot import its model of this class: the image processors of Qwen-VL want "
        "torchvision, which the lock file for CPUs leaves out (on PyPI it is CUDA's, and takes "
        "transformers down with it)",
    ),
    (
        r"exports no speculation counters",
        "vLLM's /metrics names the counters of speculation otherwise (specmill.compat), or it does "
        "not speculate",
    ),
    (
        r"model type `?'?[\w.-]+'?`? but Transformers does not recognize|"
        r"Unrecognized (configuration class|model)",
        "transformers does not know this class, and speculators and this pipeline read configs "
        "with it, without the checkpoint's own code",
    ),
    (
        r"lacks (d2t|t2d)|asked for a draft vocabulary|model's (d2t|t2d) is not",
        "speculators falls back to the verifier's whole vocabulary without an error where it finds "
        "no token frequencies",
    ),
)


def explain(error: str) -> str | None:
    """The known incompatibility that an error is, None when it is none of them."""
    return next((why for words, why in _KNOWN if re.search(words, error)), None)
