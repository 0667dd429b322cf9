"""Several kinds of models behind one command line: whose flags are whose, and what a script says it trains."""

import pytest

from megatron_lite.config import flags_of
from megatron_lite.errors import ConfigError
from megatron_lite.training.arguments import CONFIGS, build_parser, parse_args
from megatron_lite.training.families import FAMILIES, OWN_FLAGS, defaults_of, family_of, owners
from megatron_lite.training.flag_tables import noted
from megatron_lite.training.record import args_defaults_of, load_script
from tests.e2e.launch import ROOT

OWNED = sorted({flag for _, flags in OWN_FLAGS for flag in flags.split()})


def words_of(spelling: str) -> list[str]:
    """The flag with a value other than its default."""
    flag = next(f for config in CONFIGS for f in flags_of(config) if spelling in (*f.spellings, *f.negations))
    if flag.is_switch:
        return [spelling]
    if flag.choices:
        return [spelling, next(str(choice) for choice in flag.choices if choice != flag.default)]
    return [spelling, "7" if flag.kind in ("int", "float", "int list") else "some"]


def test_flags_of_families_are_flags():
    known = {spelling for action in build_parser()._actions for spelling in action.option_strings}
    assert set(OWNED) <= known
    assert {name for names, _ in OWN_FLAGS for name in names.split()} <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flag_of_another_family_is_refused_with_the_scripts_that_read_it(family):
    late = {row.flag.spellings[0] for row in noted()}  # refused by everybody, for another reason
    foreign = [flag for flag in OWNED if family not in owners([flag]) and flag not in late]
    with pytest.raises(ConfigError) as raised:
        parse_args([word for flag in foreign for word in words_of(flag)], args_defaults=defaults_of(family))
    text = str(raised.value)
    for flag in foreign:
        theirs = owners([flag])
        assert f"{flag} " in text and FAMILIES[theirs[0]].script in text
    assert text.count(f"{FAMILIES[family].script} trains {FAMILIES[family].title}") == len(foreign)


def test_own_flags_pass_and_so_do_defaults_of_foreign_ones():
    args = parse_args(["--fim-data", "--fim-rate", "0.3"], args_defaults=defaults_of("gpt"))
    assert args.fim_rate == 0.3 and family_of(args) == "gpt"
    parse_args(["--fim-rate", "0.5"], args_defaults=defaults_of("bert"))


def test_a_script_that_does_not_name_its_family_may_use_every_flag():
    """A user's own script: nobody knows what it reads."""
    args = parse_args(["--fim-data"])
    assert args.model_family is None and family_of(args) == "gpt"


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if (ROOT / family.script).exists()])
def test_a_script_trains_what_it_says(family):
    assert args_defaults_of(load_script(ROOT / FAMILIES[family].script)) == defaults_of(family)
