"""Rules of what is logged, profiled and written to files beside checkpoints."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec
from typing import Any

from megatron_lite.training.rule import Rule, flag_of, positive

_DUMPS = ("save_params_interval", "save_activations_interval", "save_wgrads_interval", "save_dgrads_interval")


def _without_package(a: Namespace) -> bool | dict[str, Any]:
    """A flag that was given, and the optional package that it needs and this environment lacks."""
    for name, package in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        try:
            if getattr(a, name) and find_spec(package) is None:
                return {"flag": f"{flag_of(name)} {getattr(a, name)}", "package": package}
        except ModuleNotFoundError:
            return {"flag": f"{flag_of(name)} {getattr(a, name)}", "package": package}
    return False


LOGGING: tuple[Rule, ...] = (
    Rule(
        lambda a: bool(a.wandb_project) and not a.wandb_exp_name,
        "--wandb-project {wandb_project} without --wandb-exp-name",
        "a run of W&B has a name",
        "--wandb-exp-name NAME",
    ),
    Rule(
        lambda a: _without_package(a),
        "{flag} needs the package {package}, which is not installed",
        "the run is logged by it",
        "pip install {package}, or leave the flag out",
    ),
    *(positive(name) for name in ("train_sync_interval", "log_memory_interval", *_DUMPS)),
    Rule(
        lambda a: {"found": asked} if (asked := _dumps_asked_for(a)) and not a.save else False,
        "{found} without --save",
        "the files lie in the save folder",
        "--save FOLDER",
    ),
    Rule(
        lambda a: a.profile and a.profile_step_end <= a.profile_step_start,
        "--profile-step-start {profile_step_start} --profile-step-end {profile_step_end}",
        "the profile ends before it starts",
        "a larger --profile-step-end",
    ),
    Rule(
        lambda a: a.profile and bool(a.train_iters) and a.profile_step_start > a.train_iters,
        "--profile-step-start {profile_step_start} with --train-iters {train_iters}",
        "the run ends before its profile begins",
        "a smaller --profile-step-start",
    ),
    Rule(
        lambda a: bool(a.profile_ranks) and not 0 <= min(a.profile_ranks) <= max(a.profile_ranks) < a.world_size,
        "--profile-ranks {profile_ranks} in a world of {world_size}",
        "ranks are numbered from 0, and one that is not there profiles nothing",
        "--profile-ranks 0",
    ),
)


def _dumps_asked_for(a: Namespace) -> str:
    return " and ".join(f"{flag_of(name)} {getattr(a, name)}" for name in _DUMPS if getattr(a, name) is not None)
