"""Starting costs little: measured in CPU time, because the machine that runs this may be busy."""

import resource

from tests.e2e.launch import TINY, run


def cpu_seconds(*words, **env):
    """CPU time, of user and system together, of a process that ends well; it has no more than one thread a library."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(*words, **env).ok()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_help_takes_less_than_a_second():
    """An import of torch alone takes longer."""
    done, seconds = cpu_seconds("--help")
    assert "--tensor-model-parallel-size" in done.out
    assert seconds < 1.0


def test_the_first_step_of_a_tiny_model_is_done_within_ten_seconds():
    """From the command to the end of a run that leaves after its first iteration."""
    done, seconds = cpu_seconds(*TINY, "--train-iters", 2, "--exit-interval", 1)
    assert len(done.lines) == 1
    assert seconds < 10.0
