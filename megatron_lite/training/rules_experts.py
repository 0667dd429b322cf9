"""Rules on experts: those of the config, told with all others before anything is built, and those of a run."""

from __future__ import annotations

from argparse import Namespace

from megatron_lite.errors import ConfigError
from megatron_lite.training.rule import Rule, broken, positive, reported
from megatron_lite.transformer.moe.moe_rules import moe_problems


def check_upcycling(args: Namespace) -> ConfigError | None:
    """What of the flags cannot be."""
    if not args.moe_use_upcycling:
        return None
    if not args.num_experts or not args.save or not args.load:
        return ConfigError(
            "--moe-use-upcycling without --num-experts, --load and --save",
            why="it reads a dense model and writes one with experts",
            fix="all three",
        )
    parts = args.moe_upcycling_granularity
    if parts < 1 or args.num_experts % parts:
        return ConfigError(
            f"--moe-upcycling-granularity {parts} with --num-experts {args.num_experts}",
            why="so many experts together are one dense MLP, and there is a whole number of them",
            fix="a divisor of the experts",
        )
    if args.moe_shared_expert_intermediate_size is not None:
        return ConfigError(
            "--moe-use-upcycling with --moe-shared-expert-intermediate-size",
            why="a dense model has nothing that could become the shared experts",
            fix="leave one of them out",
        )
    return None


def check_overlap(args: Namespace) -> ConfigError | None:
    """`--overlap-moe-expert-parallel-comm` does nothing here; what Megatron refuses is refused."""
    obstacles = {
        "--expert-model-parallel-size 1": args.expert_model_parallel_size == 1,
        "--moe-token-dispatcher-type allgather": args.moe_token_dispatcher_type == "allgather",
        "--moe-shared-expert-overlap": args.moe_shared_expert_overlap,
        "--recompute-granularity full": args.recompute_granularity == "full",
        f"--mtp-num-layers {args.mtp_num_layers}": (args.mtp_num_layers or 0) > 1,
        "pipeline stages that are not cut into virtual ones": args.pipeline_model_parallel_size > 1
        and args.virtual_pipeline_model_parallel_size is None,
    }
    found = [name for name, there in obstacles.items() if there]
    if not args.overlap_moe_expert_parallel_comm or not found:
        return None
    return ConfigError(
        f"--overlap-moe-expert-parallel-comm with {', '.join(found)}",
        why="it asks for one micro-batch's exchange of tokens beside another's computation, and this leaves none",
        fix="leave it out: the numbers are the same",
    )


EXPERTS: tuple[Rule, ...] = (
    reported(check_upcycling),
    reported(check_overlap),
    Rule(
        lambda a: a.moe_router_padding_for_quantization and a.moe_token_dispatcher_type == "allgather",
        "--moe-router-padding-for-quantization with --moe-token-dispatcher-type allgather",
        "this dispatcher does not sort tokens into padded groups",
        "leave it out, or --moe-token-dispatcher-type alltoall",
    ),
    positive("save_tokens_per_expert_interval"),
    Rule(
        lambda a: bool(a.save_tokens_per_expert_interval) and not (a.num_experts and a.save),
        "--save-tokens-per-expert-interval {save_tokens_per_expert_interval} without --num-experts and --save",
        "the counts go into the save folder",
        "both, or leave it out",
    ),
    positive("moe_routing_trace_max_training_iters"),
    Rule(
        lambda a: a.moe_routing_trace_path is not None and not a.num_experts,
        "--moe-routing-trace-path {moe_routing_trace_path} without --num-experts",
        "a dense model routes nothing",
        "--num-experts N, or leave it out",
    ),
    Rule(
        lambda a: bool(a.num_experts) and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
        "--num-experts {num_experts} with --tensor-model-parallel-size {tensor_model_parallel_size} without "
        "--sequence-parallel",
        "all tensor-parallel ranks would route the same tokens, and experts get every token once",
        "--sequence-parallel",
    ),
)


def problems_of_experts(args: Namespace) -> list[ConfigError]:
    """What of the arguments about experts cannot be, after `derived.derive`."""
    config = Namespace(**vars(args), num_moe_experts=args.num_experts, variable_seq_lengths=False)
    return [*moe_problems(config), *broken(EXPERTS, args)]
