"""What a family of Hugging Face's models is: settings with a name on both sides, and what must hold beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt.hf_names import Args, Config, Row, Sizes, refuse


@dataclass(frozen=True)
class Setting:
    """A number of both sides; `default` is what transformers takes when the key is missing (None: it must be there)."""

    theirs: str
    flag: str
    ours: str
    default: Any = None


@dataclass(frozen=True)
class Family:
    """A family of models.

    settings: numbers with a name on both sides. flags: further words that every member has. requires: our arguments
    whose value makes the family. demands: keys of config.json that, if there, must have one of these values.
    read, write: what takes more than a table. model_family: our kind of model. architecture_of: arguments -> its class,
    where members have several. copies: tensors that may lie beside the one they are tied to. note: config.json -> what
    who brings such a model should know. ends: names of the embedding and of the output layer, where config.json does
    not tell whether they are one: it is looked up, and `read` finds `output_is_embedding` in the config.
    """

    model_type: str
    architecture: str
    rows: Sequence[Row]
    settings: Sequence[Setting]
    flags: str
    requires: Mapping[str, Any]
    read: Callable[[Config], Iterator[object]]
    write: Callable[[Args, Sizes], dict[str, Any]]
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied_by_default: bool = False
    model_family: str = "gpt"
    architecture_of: Callable[[Args], str] | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    note: Callable[[Config], str] = lambda config: ""
    ends: tuple[str, str] | None = None

    def to_flags(self, config: Config) -> list[str]:
        """The command line of the model that config.json describes. Raises: ConfigError naming what we lack."""
        words: list[object] = [*self.flags.split()]
        for key, allowed in {**_QUANTIZED, **self.demands}.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise refuse(
                    f"config.json has {key} = {value!r}",
                    f"a {self.model_type} model is understood with {key} = {' or '.join(map(repr, allowed))}",
                )
        for setting in self.settings:
            value = config.get(setting.theirs)
            value = setting.default if value is None else value
            if value is None:
                raise refuse(
                    f"config.json has no {setting.theirs}", f"every {self.model_type} model has it", "the whole file"
                )
            words += [setting.flag, value]
        if self.ends is None and not config.get("tie_word_embeddings", self.tied_by_default):
            words.append("--untie-embeddings-and-output-weights")
        return [str(word) for word in [*words, *self.read(config)]]

    def problems(self, args: Args) -> list[str]:
        """What of these arguments the family cannot say; empty: it fits."""
        found = []
        for name, wanted in {**_NEUTRAL, **self.requires}.items():
            if wanted is ANY:
                continue
            value = args.get(name, wanted)
            allowed = wanted if isinstance(wanted, tuple) else (wanted,)
            if value not in allowed:
                found.append(f"{name} is {value!r}, not {' or '.join(map(repr, allowed))}")
        try:
            if not found:
                self.write(args, Sizes.of(args, 1))
        except ConfigError as error:
            found.append(error.what)
        return found

    def to_config(self, args: Args, sizes: Sizes) -> dict[str, Any]:
        """config.json of a model with these arguments, without what belongs to its tokenizer. Raises: ConfigError."""
        problems = self.problems(args)
        if problems:
            raise refuse(
                f"the checkpoint is no {self.model_type} model:\n    " + "\n    ".join(problems),
                f"{self.architecture} has no such part",
                "another --hf-model-type, or leave it out to have the fitting one found",
            )
        numbers = {setting.theirs: args[setting.ours] for setting in self.settings}
        return {
            "architectures": [self.architecture_of(args) if self.architecture_of else self.architecture],
            "model_type": self.model_type,
            "vocab_size": sizes.vocabulary,
            "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
            **numbers,
            **self.write(args, sizes),
        }


ANY = object()  # of a family's requirements: `write` looks at this one
_QUANTIZED: dict[str, tuple[Any, ...]] = {"quantization_config": (None,)}
# Arguments that no family here has a word for, with the values under which they do nothing.
_NEUTRAL: dict[str, Any] = {
    "model_family": (None, "gpt"),
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "squared_relu": False,
    "quick_geglu": False,
    "geglu": False,
    "relu": False,
    "softmax_scale": None,
    "use_mup": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "num_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": (None, 0),
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "spec": (None, ["local"]),
}
