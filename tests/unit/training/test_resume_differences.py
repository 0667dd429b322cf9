"""A resumed run says what it changes, and goes on as another training only where it is told to."""

from argparse import Namespace

import pytest

from megatron_lite.config import flags_of
from megatron_lite.errors import CheckpointError
from megatron_lite.training.arguments import CONFIGS, parse_args, validate_args
from megatron_lite.training.checkpoint_args import MODEL_ARGUMENTS, args_to_save
from megatron_lite.training.resume_differences import EFFECTS, MODEL, UNJUDGED, check_args, effects

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 7 "
    "--train-iters 9 --position-embedding-type rope"
)


def arguments(more="", world_size=1):
    return validate_args(parse_args(f"{BASE} {more}".split()), world_size)


def resume(capsys, more="", *, there="", world_size=1, **how):
    """What is printed where the checkpoint's run was started with `there` and this one with `more`."""
    saved = args_to_save(arguments(there))
    here = arguments(more, world_size)
    capsys.readouterr()
    check_args(here, saved, "folder", finetune=how.pop("finetune", False), trains=how.pop("trains", True), **how)
    return capsys.readouterr().out


# What makes the run that goes on another training, by the effect that is named.
OTHER = {
    "--seed 5": "seed: 1234 there, 5 here (other samples",
    "--global-batch-size 8": "global_batch_size: 4 there, 8 here (an update sees another number",
    "--seq-length 4": "seq_length: 8 there, 4 here (other samples",
    "--split 9,1,0": "split: None there, 9,1,0 here (other samples",
    "--vocab-size 6": "vocab_size: 7 there, 6 here (token numbers",
    "--rotary-base 500000": "rotary_base: 10000 there, 500000 here (the model computes",
    "--hidden-dropout 0.3": "hidden_dropout: 0.1 there, 0.3 here (the model computes",
    "--clip-grad 0.5": "clip_grad: 1.0 there, 0.5 here (weights are updated",
    "--optimizer sgd": "optimizer: adam there, sgd here (weights are updated",
    "--eod-mask-loss": "eod_mask_loss: False there, True here (another loss",
    "--bf16": "bf16: False there, True here (numbers of another precision",
    "--hidden-size 16": "hidden_size: 8 there, 16 here",
    "--num-query-groups 1 --group-query-attention": "group_query_attention: False there, True here",
}


@pytest.mark.parametrize("more", OTHER)
def test_another_training_is_refused_by_name_and_effect(capsys, more):
    """A typing mistake in a resume would go on in silence under another seed or batch."""
    with pytest.raises(CheckpointError) as error:
        resume(capsys, more)
    assert OTHER[more] in str(error.value)


@pytest.mark.parametrize("more", OTHER)
def test_force_goes_on_and_tells(capsys, more):
    out = resume(capsys, f"{more} --force")
    assert OTHER[more].partition(" (")[0] in out and "NOTE: " in out


def test_force_with_names_allows_these_alone(capsys):
    """Left behind in a script, a bare --force would hide the next mistake."""
    assert "seed: 1234 there, 5 here" in resume(capsys, "--seed 5 --force seed")
    with pytest.raises(CheckpointError) as error:
        resume(capsys, "--seed 5 --global-batch-size 8 --force seed")
    assert "global_batch_size" in str(error.value) and "seed: " not in str(error.value)
    assert error.value.fix.startswith("the values of then; or --force global_batch_size, ")
    assert resume(capsys, "--global-batch-size 8 --force global-batch-size")


def test_a_name_behind_force_that_no_argument_has_is_an_error(capsys):
    """It allowed nothing, in silence."""
    with pytest.raises(CheckpointError, match="--force global_batchsize: no argument has this name") as error:
        resume(capsys, "--force global-batchsize")
    assert error.value.fix == "did you mean global_batch_size?"


def test_all_differences_stand_in_one_refusal(capsys):
    with pytest.raises(CheckpointError) as error:
        resume(capsys, "--seed 5 --clip-grad 0.5 --hidden-size 16")
    assert all(name in str(error.value) for name in ("seed: ", "clip_grad: ", "hidden_size: "))


def test_a_batch_that_follows_from_the_number_of_ranks_does_not_change_in_silence(capsys):
    """Without --global-batch-size it is micro-batch * dp: twice the ranks were twice the batch."""
    saved = args_to_save(arguments())
    saved["global_batch_size"] = 1
    here = validate_args(parse_args(BASE.replace("--global-batch-size 4", "").split()), 2)
    with pytest.raises(CheckpointError, match="global_batch_size: 1 there, 2 here"):
        check_args(here, saved, "folder", finetune=False, trains=True)


def test_harmless_differences_are_one_block_by_effect(capsys):
    more = "--tensor-model-parallel-size 2 --micro-batch-size 2 --log-interval 7 --eval-iters 3 --train-iters 12"
    out = resume(capsys, f"{more} --load x --recompute-granularity selective", world_size=2)
    lines = out.splitlines()
    assert lines[0] == "> other arguments than the checkpoint's; the command line's hold:"
    assert "NOTE" not in out and "load" not in out
    by_effect: dict[str, list[str]] = {}
    effect = ""
    for line in lines[1:]:
        if line.startswith(">     "):
            by_effect[effect].append(line.strip("> "))
        else:
            effect = line.strip("> ")
            by_effect[effect] = []
    layout = by_effect["the same training on other ranks or in other parts"]
    assert "tensor_model_parallel_size: 1 there, 2 here" in layout and "micro_batch_size: 1 there, 2 here" in layout
    assert by_effect["what is logged"] == ["log_interval: 100 there, 7 here"]
    assert by_effect["what is evaluated, and when"][0] == "eval_iters: 100 there, 3 here"
    assert any(effect.startswith("length of the run") for effect in by_effect)


def test_the_same_command_says_nothing(capsys):
    assert resume(capsys, "--load x --save x --save-interval 3", there="--save x --save-interval 3") == ""


def test_fine_tuning_takes_weights_and_cares_for_them_alone(capsys):
    assert resume(capsys, "--seed 5 --global-batch-size 8 --bf16 --seq-length 4", finetune=True) == ""
    with pytest.raises(CheckpointError, match="hidden_size: 8 there, 16 here"):
        resume(capsys, "--hidden-size 16", finetune=True)


def test_a_new_phase_may_have_other_data_and_another_batch_but_no_other_optimizer(capsys):
    """At one of --phase-transition-iterations that is what the user stopped for."""
    assert "seq_length: 8 there, 4 here" in resume(capsys, "--seq-length 4 --global-batch-size 8", new_phase=True)
    with pytest.raises(CheckpointError, match="optimizer: "):
        resume(capsys, "--seq-length 4 --optimizer sgd", new_phase=True)


def test_who_does_not_train_is_not_refused(capsys):
    """`generate` and --skip-train have a seed and a batch of their own; other positions they are told."""
    out = resume(capsys, "--seed 5 --global-batch-size 8 --rotary-base 500000", trains=False)
    assert "rotary_base: 10000 there, 500000 here" in out and "seed" not in out and "batch" not in out


def test_a_folder_that_moved_is_the_same_place(capsys):
    there = BASE.replace("--mock-data", "--data-path 1 corpora/a 2 /mnt/corpora/b --split 9,1,0")
    here = there.replace("corpora/a", "/new/corpora/a")
    saved = args_to_save(validate_args(parse_args(there.split()), 1))
    check_args(validate_args(parse_args(here.split()), 1), saved, "folder", finetune=False, trains=True)
    assert "data_path" not in capsys.readouterr().out
    for old, new in (("2 /mnt/corpora/b", ""), ("corpora/a", "corpora/aa"), ("--data-path 1", "--data-path 3")):
        other = here.replace(old, new)
        with pytest.raises(CheckpointError, match="data_path: "):
            check_args(validate_args(parse_args(other.split()), 1), saved, "folder", finetune=False, trains=True)


def test_a_tokenizer_that_moved_is_known_by_its_content(capsys):
    saved = {**args_to_save(arguments()), "tokenizer_model": "/old/tokenizer.model"}
    here = Namespace(**{**vars(arguments()), "tokenizer_model": "/new/tokenizer.model"})
    check_args(here, saved, "folder", finetune=False, trains=True, same_tokenizer=lambda: True)
    with pytest.raises(CheckpointError, match="tokenizer_model: /old/tokenizer.model there"):
        check_args(here, saved, "folder", finetune=False, trains=True, same_tokenizer=lambda: False)


def test_every_name_of_the_table_is_a_flag_and_stands_once():
    flags = {flag.dest for config in CONFIGS for flag in flags_of(config)} | {"model_family"}
    names = [name for _, row, _ in EFFECTS for name in row.split()]
    assert sorted(set(names) - flags) == []
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_flag_has_an_effect_and_a_new_one_is_careful():
    table = effects()
    assert all(table[name] is MODEL for name in MODEL_ARGUMENTS)
    unjudged = sorted(name for name, effect in table.items() if effect is UNJUDGED)
    assert UNJUDGED.another_training
    assert unjudged == [], (
        "give them a row of resume_differences.EFFECTS: what does a change in them do to a resumed run?"
    )
