"""All families of Hugging Face that `megatron-lite convert` reads and writes. A new one is a line here."""

from __future__ import annotations

from megatron_lite.errors import ConfigError
from megatron_lite.models.bert.hf_names import BERT_FAMILIES
from megatron_lite.models.gpt.hf_config import FAMILIES as GPT_FAMILIES
from megatron_lite.models.gpt.hf_config import MISSING
from megatron_lite.models.gpt.hf_family import Family
from megatron_lite.models.gpt.hf_names import Args, Config, refuse
from megatron_lite.models.T5.hf_names import T5

FAMILIES: dict[str, Family] = {**GPT_FAMILIES, **BERT_FAMILIES, T5.model_type: T5}


def family_of(config: Config) -> Family:
    """The family that config.json names. Raises: ConfigError that says what is missing for it."""
    kind = config.get("model_type")
    if kind in FAMILIES:
        return FAMILIES[kind]
    raise refuse(
        f"config.json has model_type = {kind!r}",
        MISSING.get(str(kind), "this family is not known") + f"; known are {', '.join(FAMILIES)}",
        "a model of one of these families",
    )


def fitting_family(args: Args, wanted: str | None = None) -> Family:
    """The first family that can say these arguments, or the wanted one. Raises: ConfigError."""
    if wanted is not None:
        if wanted not in FAMILIES:
            raise ConfigError(f"--hf-model-type {wanted}", why=f"known are {', '.join(FAMILIES)}", fix="one of these")
        return FAMILIES[wanted]
    reasons = {}
    for name, family in FAMILIES.items():
        reasons[name] = family.problems(args)
        if not reasons[name]:
            return family
    closest = min(reasons, key=lambda name: len(reasons[name]))
    raise refuse(
        f"no known family of Hugging Face computes what this checkpoint does; {closest} comes closest, but\n"
        + "\n".join(f"    {reason}" for reason in reasons[closest]),
        f"known are {', '.join(FAMILIES)}",
        "generate from the checkpoint here (megatron-lite generate)",
    )
