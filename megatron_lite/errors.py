"""What a user may read when something is wrong: what was found, why it cannot be, and the fix as something to type.

    ConfigError       flags, values and combinations of them
    DataError         corpora, tokenizers, caches
    CheckpointError   saving and loading
    RankFailure       a rank failed, hangs, or disagrees
      PeerLost          another one, as this rank sees it
      ResultRejected    a loss or gradient that cannot be right; status 17
      RerunElsewhere    the same, and another machine is to compute it again; status 16

The entry points print the text and exit with a status other than 0; a traceback is for our own bugs only.
"""


class MegatronLiteError(Exception):
    """An error that is the user's to mend, in three parts.

    Args:
        what: what was found, with the flags or files and their values.
        why: the rule that it breaks.
        fix: what to type or do instead.
    """

    exit_status = 1
    on_every_rank = False  # every rank raises the same: rank 0 says it for all

    def __init__(self, what: str, *, why: str = "", fix: str = ""):
        self.what, self.why, self.fix = what, why, fix
        super().__init__(what, why, fix)  # args: so that the error survives pickling between processes

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.why, self.fix)

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"  why: {self.why}")
        if self.fix:
            parts.append(f"  fix: {self.fix}")
        return "\n".join(parts)


def _rebuild(kind: type[MegatronLiteError], what: str, why: str, fix: str) -> MegatronLiteError:
    return kind(what, why=why, fix=fix)


class ConfigError(MegatronLiteError):
    """Flags, or a combination of flags, that cannot be run. Exit status 2, as argparse has it."""

    exit_status = 2
    on_every_rank = True


class DataError(MegatronLiteError):
    """A corpus, tokenizer or index cache that cannot be used."""


class CheckpointError(MegatronLiteError):
    """A checkpoint that cannot be written or read."""


class RankFailure(MegatronLiteError):
    """A rank that failed, hangs or holds other values than its peers."""


class PeerLost(RankFailure):
    """Another rank is gone, or never came to a collective: this rank is a witness, and the cause lies elsewhere."""


class ResultRejected(RankFailure):
    """A loss or gradient that cannot be right; all ranks have agreed to stop. Exit status as in Megatron."""

    exit_status = 17
    on_every_rank = True


class RerunElsewhere(RankFailure):
    """The same, saved as it was before the step: a start on other hardware tells whose fault it is. As in Megatron."""

    exit_status = 16
    on_every_rank = True
