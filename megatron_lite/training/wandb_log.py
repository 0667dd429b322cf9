"""`--wandb-project`: a run of W&B beside TensorBoard's events: the same tags without their twins by samples.

    scalars           step = iteration; "samples vs steps" tells samples
    checkpoints       an artifact that points to the folder, registered at the first log line after it is complete; its
                      path stands in <save>/latest_wandb_artifact_path.txt
    a resume          goes on in the same run of W&B: its id stands in <folder>/run_id.txt

The package is optional: `rules` has checked that it is there. WANDB_MODE=offline keeps everything on disk.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing.folders import folder_name, read_tracker
from megatron_lite.log import say

RUN_ID, ARTIFACT = "run_id.txt", "latest_wandb_artifact_path.txt"


class WandbLog:
    """The run of W&B, on the last rank.

    Args:
        args: resolved arguments; `args.iteration` is where the run starts.

    Attributes: package: the module wandb, for users' scripts.
    """

    def __init__(self, args: Namespace):
        import wandb

        self.package: Any = wandb
        self._save = Path(args.save) if args.save else None
        folder = Path(args.wandb_save_dir or os.path.join(args.save or ".", "wandb"))
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / RUN_ID
        same = known.read_text(encoding="utf-8").strip() if args.iteration and known.is_file() else None
        config = {
            name: value for name, value in vars(args).items() if isinstance(value, (int, float, str, list, type(None)))
        }
        run = wandb.init(
            project=args.wandb_project,
            name=args.wandb_exp_name,
            entity=args.wandb_entity,
            dir=str(folder),
            config=config,
            id=same,
            resume="allow" if same else None,
        )
        self._run: Any = run
        known.write_text(f"{run.id}\n", encoding="utf-8")
        self._seen = self._latest()  # what was saved before this run is registered already

    def add_scalar(self, tag: str, value: float, iteration: int) -> None:
        """As TensorBoard's writers have it."""
        self.package.log({tag: value}, iteration)

    def register_checkpoint(self) -> None:
        """Note the newest complete checkpoint, if it was not noted yet."""
        latest = self._latest()
        if self._save is None or latest is None or latest == self._seen:
            return
        self._seen = latest
        path = (self._save / folder_name(latest)).resolve()
        artifact = self.package.Artifact(f"{self._run.project}-checkpoints", "model", metadata={"iteration": latest})
        try:
            artifact.add_reference(f"file://{path}", checksum=False)
            self._run.log_artifact(artifact, aliases=[path.name])
        except Exception as problem:  # whatever the package or its service says: no reason to end a run
            say(f"WARNING: W&B did not register {path}: {problem}", sys.stderr)
            return
        owner = f"{self._run.entity}/" if self._run.entity else ""
        name = f"{owner}{self._run.project}/{self._run.project}-checkpoints:{path.name}\n"
        (self._save / ARTIFACT).write_text(name, encoding="utf-8")

    def finish(self) -> None:
        """The end of the run."""
        self.register_checkpoint()
        self.package.finish()

    def _latest(self) -> Any:
        return read_tracker(self._save) if self._save is not None else None
