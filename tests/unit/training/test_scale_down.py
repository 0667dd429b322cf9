"""Small runs keep the structure of the large one, and are legal whatever it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.scale_down import alone, scale_down, without_precision

LLAMA = """--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --swiglu --normalization RMSNorm --bf16
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --lr 1e-4
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 100000 --hidden-dropout 0.1""".split()


def small_of(*flags: str, dp: int = 16, max_ranks: int = 8):
    return scale_down(parse_args([*LLAMA, *flags]), dp, 5, max_ranks)


def test_a_large_model_becomes_a_small_one_of_the_same_structure():
    small, changes = small_of("--tensor-model-parallel-size", "8", "--sequence-parallel", "--load", "/nowhere")
    validate_args(small, small.world_size)
    assert (small.tensor_model_parallel_size, small.data_parallel_size, small.world_size) == (4, 2, 8)
    assert (small.num_layers, small.num_query_groups, small.num_attention_heads) == (2, 4, 16)
    assert small.hidden_size == 16 * small.kv_channels and small.ffn_hidden_size == 3.5 * small.hidden_size
    assert small.sequence_parallel and small.swiglu and small.bf16 and small.load is None
    assert small.hidden_dropout == 0 and small.mock_data
    assert changes[:2] == ["tp 4 instead of 8", "dp 2 instead of 16"]
    assert any("2 layers of 128" in line and "80 of 8192" in line for line in changes)


def test_fewer_processes_cost_tensor_parallel_ranks_first_and_then_there_is_one_clear_error():
    small, _ = small_of("--tensor-model-parallel-size", "8", max_ranks=4)
    assert (small.tensor_model_parallel_size, small.data_parallel_size) == (2, 2)
    with pytest.raises(
        ConfigError, match=r"needs 4 processes even when it is scaled down \(tp 2 x dp 2\).*\n.*\n.*"
    ) as e:
        small_of("--tensor-model-parallel-size", "8", max_ranks=3)
    assert "--max-processes 4" in str(e.value)


def test_layouts_are_compared_without_casts_to_fp8_and_that_is_said():
    """A difference in the last bit becomes one of a sixteenth, and every layout would seem wrong."""
    small, changes = small_of("--fp8-format", "hybrid", "--fp8-recipe", "mxfp8", "--first-last-layers-bf16")
    validate_args(small, small.world_size)
    assert small.fp8_format is None and any("no casts to FP8" in line for line in changes)


def test_flags_of_the_users_own_script_stay_as_they_are():
    """A model of one's own reads them from the arguments, also in its small copy."""
    given = parse_args(
        [*LLAMA, "--taps", "3"], extra_args_provider=lambda parser: parser.add_argument("--taps", type=int)
    )
    small, _ = scale_down(given, 2, 5, 8)
    assert small.taps == 3


def test_a_shape_that_could_not_start_is_not_made_legal_by_scaling():
    with pytest.raises(ConfigError, match="--num-attention-heads 64 with --tensor-model-parallel-size 6"):
        small_of("--tensor-model-parallel-size", "6")
    with pytest.raises(ConfigError, match="--num-layers --hidden-size: not given"):
        scale_down(parse_args(["--num-attention-heads", "4"]), 2, 5, 8)


@given(
    experts=st.sampled_from([2, 4, 8, 64, 256]),
    topk=st.sampled_from([2, 4, 8]),
    groups=st.sampled_from([None, (2, 1), (8, 4)]),
    ep=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 4]),
    expert_tp=st.sampled_from([None, 1]),
    pattern=st.sampled_from(["1", "2", "[0]*3+[1]*77"]),
)
def test_experts_become_few_and_stay_spread(experts, topk, groups, ep, tp, expert_tp, pattern):
    """Any legal choice stays one; a real exchange between ranks is checked as one."""
    count, kept = groups or (1, 1)
    if topk > experts or experts % count or topk < kept or topk > kept * experts // count or experts % ep:
        return
    words = f"--num-experts {experts} --moe-router-topk {topk} --moe-ffn-hidden-size 2048 --moe-layer-freq {pattern}"
    words += f" --moe-shared-expert-intermediate-size 1024 --expert-model-parallel-size {ep}"
    words += f" --tensor-model-parallel-size {tp}" + " --sequence-parallel" * (tp > 1)
    words += "" if groups is None else f" --moe-router-num-groups {count} --moe-router-group-topk {kept}"
    words += "" if expert_tp is None else f" --expert-tensor-parallel-size {expert_tp}"
    small, changes = small_of(*words.split(), dp=8)
    validate_args(alone(small), 1)
    validate_args(small, small.world_size)
    assert small.num_experts <= 8 and small.expert_model_parallel_size == min(ep, 2)
    assert any(f"instead of {experts}, {topk} and {ep}" in line for line in changes)


@given(
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    heads_per_rank=st.integers(1, 8),
    groups=st.sampled_from([0, 1, 2, 4, 8, 16]),
    head=st.sampled_from([64, 80, 128]),
    dp=st.integers(1, 64),
    sequence_parallel=st.booleans(),
)
def test_any_shape_and_layout_gives_legal_runs(tp, heads_per_rank, groups, head, dp, sequence_parallel):
    """Whatever divides in the large run divides in the small one, and fewer groups than ranks stay fewer."""
    heads = tp * heads_per_rank
    if groups and (heads % groups or (groups % tp and tp % groups)):
        return
    words = [f"--tensor-model-parallel-size={tp}", f"--num-attention-heads={heads}", f"--hidden-size={heads * head}"]
    words += ["--sequence-parallel"] * sequence_parallel
    given = parse_args([*LLAMA, *words, f"--num-query-groups={groups or 1}"])
    given.group_query_attention = bool(groups)
    small, _ = scale_down(given, dp, 5, 8)
    if groups:
        assert (small.num_query_groups < small.tensor_model_parallel_size) == (groups < tp)
    for args in (small, without_precision(small)):
        one = alone(args)
        validate_args(one, 1)
        validate_args(args, small.world_size)
        assert (one.hidden_size, one.num_attention_heads, one.vocab_size) == (
            args.hidden_size,
            args.num_attention_heads,
            args.vocab_size,
        )
        assert one.global_batch_size == args.global_batch_size


def test_kinds_and_levels_of_context_parallelism_stay():
    """A ring across groups is checked with two groups of two; every kind of exchange keeps a layer."""
    levels = ["--context-parallel-size", "16", "--hierarchical-context-parallel-sizes", "4", "4"]
    small, _ = small_of(*levels, "--cp-comm-type", "a2a+p2p", dp=4)
    one = alone(small)
    validate_args(small, small.world_size)
    assert (small.context_parallel_size, small.hierarchical_context_parallel_sizes) == (4, [2, 2])
    validate_args(one, 1)
    assert (one.context_parallel_size, one.hierarchical_context_parallel_sizes) == (1, None)
    kinds = ["p2p"] * 40 + ["a2a"] * 30 + ["all_gather"] * 10
    small, _ = small_of("--context-parallel-size", "8", "--cp-comm-type", *kinds)
    validate_args(small, small.world_size)
    assert small.num_layers == 3 and small.cp_comm_type == ["p2p", "a2a", "all_gather"]


def test_a_small_run_is_sharded_as_the_large_one_and_its_reference_is_not():
    """verify would have compared plain data parallelism with one process, and said that full sharding is right."""
    words = "--use-megatron-fsdp --num-distributed-optimizer-instances 8 --megatron-fsdp-grad-comm-dtype bf16".split()
    small, _ = small_of(*words)
    assert small.use_megatron_fsdp and small.megatron_fsdp_grad_comm_dtype == "bf16"
    assert small.num_distributed_optimizer_instances == 2 and small.data_parallel_size == 4  # two copies, cut in two
    assert without_precision(small).megatron_fsdp_grad_comm_dtype == "auto"
    assert not alone(small).use_megatron_fsdp and alone(small).num_distributed_optimizer_instances == 1
