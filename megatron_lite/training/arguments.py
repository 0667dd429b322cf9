"""The command line of a run: all configs -> one parser -> one namespace with Megatron's names -> the configs again.

    words of the command line                     precedence: command line > --config file.yaml > the script's > default
       |  stray quotes stripped, YAML put in front, old spellings translated          command_line, config_files,
       v                                                                              flag_aliases
    argparse over every Flag (configs, noted and refused tables, the script's own)
       v
    Namespace --validate_args--> derived values, all broken rules at once             derived, rules
       v
    core_transformer_config_from_args(args), optimizer_config_from_args(args), ...

Megatron's rules of parsing: no abbreviation, the last of two wins, `--name value` and `--name=value`. An unknown flag
is an error with a did-you-mean. No torch here: `--help` must be quick.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_lite.checkpointing.checkpoint_config import CheckpointConfig
from megatron_lite.config import Flag, flags_of, from_namespace
from megatron_lite.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_lite.distributed.fully_sharded_config import FullyShardedConfig, TorchFullyShardedDataParallelConfig
from megatron_lite.errors import ConfigError
from megatron_lite.log import print_rank_0, speak_for_all_ranks, warn_rank_0
from megatron_lite.models.retro.config import RetroSettings
from megatron_lite.optimizer.optimizer_config import OptimizerConfig
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig
from megatron_lite.training import command_line, config_files, derived, rules
from megatron_lite.training.configs import RUN_CONFIGS
from megatron_lite.training.families import foreign_flag
from megatron_lite.training.flag_aliases import translate
from megatron_lite.training.flag_tables import (
    AS_IT_IS,
    NOTICES,
    REASONS,
    REFUSED_VALUES,
    noted,
    refused,
)
from megatron_lite.training.fully_sharded import is_alone
from megatron_lite.training.idle_flags import idle
from megatron_lite.training.launch import Launch, read_launch
from megatron_lite.transformer.mla_config import LatentAttentionConfig
from megatron_lite.transformer.transformer_config import MLATransformerConfig, TransformerConfig

if TYPE_CHECKING:
    from torch import nn

CONFIGS: tuple[type, ...] = (
    TransformerConfig,
    LatentAttentionConfig,
    *RUN_CONFIGS,
    OptimizerConfig,
    DistributedDataParallelConfig,
    FullyShardedConfig,
    CheckpointConfig,
    TokenizerConfig,
    RetroSettings,
)
ExtraArgs = Callable[[argparse.ArgumentParser], Any]


# -------------------------------------------------------------------------------------------------------------- parser
class _Parser(argparse.ArgumentParser):
    """argparse with our errors: what, why, fix."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}", why="the flag takes other words", fix="--help lists every flag")


class _Help(argparse.HelpFormatter):
    """Two columns, the flag in the left one; the default at the end of the text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=120)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.nargs == 0 or action.default in (None, [], argparse.SUPPRESS) or "Default" in text:
            return text
        shown = " ".join(map(str, action.default)) if isinstance(action.default, list) else str(action.default)
        return f"{text} (default: {shown.replace('%', '%%')})"


def build_parser(extra_args_provider: ExtraArgs | None = None) -> argparse.ArgumentParser:
    """The parser of a training script.

    Args:
        extra_args_provider: adds the script's own flags to the parser, as Megatron's scripts do.
    """
    parser = _Parser(
        description="Train a language model. Flags, data files and log line are those of Megatron-LM.",
        allow_abbrev=False,
        conflict_handler="resolve",  # a script may restate a flag
        formatter_class=_Help,
        usage="%(prog)s [flags]",
    )
    parser.add_argument(
        "--config", "--yaml-cfg", dest="config", metavar="FILE", help="YAML file with flags; the command line wins."
    )
    stated: set[str] = set()
    for config in CONFIGS:
        group = parser.add_argument_group(*_title(config))
        for flag in flags_of(config):
            flag.add_to(group)
            stated.update(flag.spellings)
    ignored = parser.add_argument_group(
        "no effect", "Speed on special hardware, or obsolete: accepted, nothing changes."
    )
    for row in noted():
        row.flag.add_to(ignored)
    for row in refused():
        row.flag.add_to(parser, hidden=True)
    if extra_args_provider is not None:
        extra_args_provider(parser)
    return parser


def all_flags() -> list[Flag]:
    """The flags that configs state."""
    return [flag for config in CONFIGS for flag in flags_of(config)]


def _title(config: type) -> tuple[str, str]:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", config.__name__.removesuffix("Config")).lower()
    return words, (config.__doc__ or "").splitlines()[0]


# --------------------------------------------------------------------------------------------------------------- parse
def parse_args(
    argv: list[str] | None = None,
    extra_args_provider: ExtraArgs | None = None,
    args_defaults: dict[str, Any] | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """The command line as a namespace with Megatron's names. `validate_args` comes next.

    Beside the flags' values the namespace holds `rank` and `world_size` (from the launcher), and `typed`: the sorted
    names that the command line or the YAML file gave.

    Args:
        argv: the words; default: those of the process.
        extra_args_provider: adds the script's own flags.
        args_defaults: the script's defaults, by name in the namespace; they lose to anything given.
        ignore_unknown_args: leave unknown words alone.
    Raises: ConfigError with every problem found.
    """
    parser = build_parser(extra_args_provider)
    actions = {spelling: action for action in parser._actions for spelling in action.option_strings}
    words = command_line.strip_stray_quotes(sys.argv[1:] if argv is None else argv)
    files, words = command_line.take_config_files(words)
    problems: list[ConfigError] = []
    for file in reversed(files):  # the last file's words come last, so that it wins; the command line's come after all
        extra, wrong = config_files.words_of(file, actions, _by_field())
        words = extra + words
        problems += wrong
    words, notices, wrong = translate(words)
    problems += wrong
    if not ignore_unknown_args:
        words, wrong = command_line.drop_unknown(words, actions)
        problems += wrong
    words, wrong = command_line.drop_unreadable(words, actions)
    problems += wrong

    parser.set_defaults(**{"model_family": None, **(args_defaults or {})})
    args, strangers = parser.parse_known_args(words)
    for name, value in vars(args).items():  # argparse hands out the default itself, and runs may change a list
        setattr(args, name, deepcopy(value))
    if strangers and not ignore_unknown_args:
        found = " ".join(strangers)
        problems.append(ConfigError(f"{found} belongs to no flag", why="every word follows a flag", fix="--help"))
    args.config = files[-1] if files else None
    args.typed = sorted({actions[name].dest for name in (word.partition("=")[0] for word in words) if name in actions})
    problems += _not_here(args)
    if args.fake_process_group:
        speak_for_all_ranks()
    try:
        launch = read_launch(alone=args.fake_process_group)
    except ConfigError as error:
        launch = Launch()
        problems.append(error)
    args.rank, args.world_size, args.local_rank = launch.rank, launch.world_size, launch.local_rank
    if problems:
        raise command_line.joined(problems)
    for notice in dict.fromkeys(notices + _notices(args)):
        print_rank_0(notice)
    return args


def _by_field() -> dict[str, str]:
    """Field of a config -> name in the namespace, where they differ: YAML may use either."""
    return {f.field: f.dest for config in CONFIGS for f in flags_of(config) if f.field != f.dest}


def _not_here(args: argparse.Namespace) -> Iterable[ConfigError]:
    """Flags whose values would be ignored: refused, because an accepted flag does what it says."""
    for name, values in REFUSED_VALUES.items():
        value = getattr(args, name, None)
        if value in values:
            yield _unsupported(f"--{name.replace('_', '-')} {value}", values[value])
    for config in CONFIGS:
        for flag in flags_of(config):
            value = getattr(args, flag.dest)
            problem = foreign_flag(flag, value, show(flag, value), args)
            if problem is not None:
                yield problem
    for row in refused():
        value = getattr(args, row.flag.dest, row.flag.default)
        if row.concerns(value):
            yield _unsupported(show(row.flag, value), row.key)


def _unsupported(flag: str, key: str) -> ConfigError:
    reason, instead = REASONS[key]
    return ConfigError(f"{flag} is not supported: {reason}", fix=instead)


def show(flag: Flag, value: Any) -> str:
    """The flag as one would type it to get the value."""
    if flag.is_switch:
        return flag.spellings[0] if value == flag.stores else (flag.negations or flag.spellings)[0]
    words = value if isinstance(value, (list, tuple)) else [value]
    return " ".join(map(str, [flag.spellings[0], *words]))


def _notices(args: argparse.Namespace) -> list[str]:
    """One line for each flag that was typed, is harmless, and does nothing here."""
    lines = []
    for row in noted():
        value = getattr(args, row.flag.dest, row.flag.default)
        if NOTICES.get(row.key) and row.concerns(value):
            lines.append(f"{show(row.flag, value)} has no effect here: {NOTICES[row.key]}")
    for flag in all_flags():
        if flag.dest in AS_IT_IS and flag.dest in args.typed:
            value = getattr(args, flag.dest)
            lines.append(f"{show(flag, value)} has no effect here: {AS_IT_IS[flag.dest]}")
    if "transformer_impl" in args.typed and args.transformer_impl == "transformer_engine":
        lines.append("--transformer-impl transformer_engine has no effect here: the layers are this package's own")
    return lines


# ------------------------------------------------------------------------------------------------------------ validate
def validate_args(args: argparse.Namespace, world_size: int | None = None) -> argparse.Namespace:
    """Fills in what follows from the flags, and holds them against the rules.

    Args:
        args: what `parse_args` returned; changed in place.
        world_size: number of ranks; default: what the launcher said.
    Returns: args.
    Raises: ConfigError that lists every broken rule.
    """
    if world_size is not None:
        args.world_size = world_size
    problems = rules.take_project(args)
    problems += rules.broken(rules.GIVEN, args)
    notices, warnings = derived.derive(args)
    warnings += idle(args, all_flags())
    problems += rules.broken(rules.DERIVED, args)
    problems += rules.broken(rules.ENCODER_DECODER, args)
    problems += rules.problems_of_experts(args) + rules.problems_of_attention(args) + rules.problems_of_context(args)
    problems += rules.problems_of_numbers(args) + rules.problems_of_retro_run(args)
    if problems:
        raise command_line.joined(problems)
    for warning in warnings:
        warn_rank_0(warning)
    print_rank_0(
        f"using world size: {args.world_size}, data-parallel size: {args.data_parallel_size}, "
        f"context-parallel size: {args.context_parallel_size}, "
        f"hierarchical context-parallel sizes: {args.hierarchical_context_parallel_sizes}, "
        f"tensor-model-parallel size: {args.tensor_model_parallel_size}, "
        f"pipeline-model-parallel size: {args.pipeline_model_parallel_size}"
    )
    for notice in notices:
        print_rank_0(notice)
    import torch  # only now: bad flags are reported without waiting for it

    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    print_rank_0(f"using {args.params_dtype} for parameters ...")
    return args


def print_args(args: argparse.Namespace) -> None:
    """The resolved configuration in Megatron's form: a sorted list, one name a line (rank 0).

    Flags without effect here are left out unless they were typed: 600 lines that say nothing of this run.
    """
    silent = {row.flag.dest for row in (*noted(), *refused())} - set(args.typed)
    silent -= {flag.dest for config in CONFIGS for flag in flags_of(config)}
    print_rank_0("------------------------ arguments ------------------------")
    for name, value in sorted(vars(args).items(), key=lambda item: item[0].lower()):
        if name in silent:
            continue
        print_rank_0(f"  {name} {'.' * (48 - len(name))} {value}")
    print_rank_0("-------------------- end of arguments ---------------------")


def resolved_configuration(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Group -> name -> value, in the order of the configs: what report and config file show."""
    groups: dict[str, dict[str, Any]] = {}
    for config in CONFIGS:
        groups[_title(config)[0]] = {flag.dest: getattr(args, flag.dest) for flag in flags_of(config)}
    shown = {name for group in groups.values() for name in group}
    rows = {row.flag.dest for row in (*noted(), *refused())}
    own = {name: value for name, value in vars(args).items() if name not in shown | rows and name not in _OF_THE_RUN}
    groups["script"] = {name: value for name, value in own.items() if name in args.typed}
    groups["no effect"] = {
        row.flag.dest: getattr(args, row.flag.dest) for row in noted() if row.flag.dest in set(args.typed) - shown
    }
    return {title: group for title, group in groups.items() if group}


_OF_THE_RUN = {"config", "model_family", "typed", "rank", "world_size", "local_rank"}


def save_config(args: argparse.Namespace, path: str) -> None:
    """Writes `config.yaml`: what was typed as settings, all else as comments. `--config` reads it to the same run.

    `--force` is the wish of one start: in the file it would let every later change pass.
    """
    config_files.save(path, resolved_configuration(args), set(args.typed) - {"force"})


# ------------------------------------------------------------------------------------------------------------- configs
def core_transformer_config_from_args(
    args: argparse.Namespace, config_class: type[TransformerConfig] = TransformerConfig
) -> TransformerConfig:
    """The TransformerConfig of the command line.

    Args:
        args: validated arguments.
        config_class: a subclass of yours, with more fields.
    """
    import torch.nn.functional as F

    from megatron_lite.fusions.bias_activation import quick_gelu, squared_relu, tanh_gelu

    activation = {"activation_func": F.gelu, "bias_activation_fusion": args.bias_gelu_fusion}
    if args.swiglu:
        activation = {"activation_func": F.silu, "bias_activation_fusion": args.bias_swiglu_fusion}
    elif args.quick_geglu:
        activation = {"activation_func": quick_gelu, "bias_activation_fusion": args.bias_gelu_fusion}
    elif args.geglu:
        gelu = tanh_gelu if args.openai_gelu else F.gelu
        activation = {"activation_func": gelu, "bias_activation_fusion": args.bias_gelu_fusion}
    elif args.relu:
        activation = {"activation_func": F.relu, "bias_activation_fusion": False}
    elif args.squared_relu:
        activation = {"activation_func": squared_relu, "bias_activation_fusion": False}
    elif args.openai_gelu:
        activation = {"activation_func": tanh_gelu, "bias_activation_fusion": args.bias_gelu_fusion}
    if args.multi_latent_attention and config_class is TransformerConfig:
        config_class = MLATransformerConfig
    return from_namespace(
        config_class,
        args,
        **_yarn_of(args, config_class),
        gated_linear_unit=derived.is_gated(args),
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        pipeline_dtype=args.params_dtype,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=args.overlap_p2p_comm,
        **activation,
    )


def _yarn_of(args: argparse.Namespace, config_class: type[TransformerConfig]) -> dict[str, Any]:
    """The flags of YaRN under the names of the config's fields: multi-latent attention has its own."""
    if issubclass(config_class, MLATransformerConfig):
        from megatron_lite.models.common.embeddings.rotary_choice import yarn_settings

        values = yarn_settings(args)
        rounded = values.pop("correction_range_round_to_int")
        return {**values, "yarn_correction_range_round_to_int": rounded, "rope_type": args.rope_type or "yarn"}
    if args.position_embedding_type != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": args.rotary_scaling_factor,
        "yarn_mscale": args.mscale,
        "yarn_mscale_all_dim": args.mscale_all_dim,
    }


def optimizer_config_from_args(args: argparse.Namespace) -> OptimizerConfig:
    """The OptimizerConfig of the command line; the training loop sets its timers."""
    return from_namespace(OptimizerConfig, args, timers=None)


def ddp_config_from_args(args: argparse.Namespace, module: nn.Module | None = None) -> DistributedDataParallelConfig:
    """The DistributedDataParallelConfig of the command line.

    Args:
        module: the model chunk, needed by `--ddp-num-buckets`: a bucket's size is its share of the parameters.
    """
    config = from_namespace(
        DistributedDataParallelConfig,
        args,
        # A dynamic loss scale finds its size by overflowing: there Inf skips the step instead of ending the run.
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad and not (args.fp16 and args.loss_scale is None),
        align_param_gather=args.align_param_gather,
        # Nothing to share out leaves the optimizer's state as the largest part that may be, over one rank.
        data_parallel_sharding_strategy="optim" if is_alone(args) else args.data_parallel_sharding_strategy,
        # The flags say for themselves what is done instead; the config refuses its fields.
        delay_wgrad_compute=False,
        outer_dp_sharding_strategy="no_shard",
        fsdp_double_buffer=False,
        fsdp_manual_registration=False,
    )
    if config.num_buckets is not None and module is not None:
        parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        config.bucket_size, config.num_buckets = max(1, parameters // config.num_buckets), None
    return config


def fully_sharded_config_from_args(args: argparse.Namespace) -> TorchFullyShardedDataParallelConfig:
    """The same for a fully sharded model."""
    plain = ddp_config_from_args(args)
    return TorchFullyShardedDataParallelConfig(
        **{item.name: getattr(plain, item.name) for item in fields(plain)},
        reshard_after_forward=args.torch_fsdp2_reshard_after_forward,
        grad_comm_dtype=args.megatron_fsdp_grad_comm_dtype,
    )


def tokenizer_config_from_args(args: argparse.Namespace) -> TokenizerConfig:
    """The TokenizerConfig of the command line."""
    return from_namespace(TokenizerConfig, args)


def checkpoint_config_from_args(args: argparse.Namespace) -> CheckpointConfig:
    """The CheckpointConfig of the command line."""
    return from_namespace(CheckpointConfig, args)
