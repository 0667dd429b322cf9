"""HuggingFaceTokenizer makes of a folder what transformers' AutoTokenizer makes of it, and more of bad ones."""

import json

import pytest
from tokenizers import Tokenizer

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer, unread_flags
from megatron_lite.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig
from tests.unit.datasets.corpora import build, write_corpus
from tests.unit.tokenizers import files
from tests.unit.tokenizers.files import TEXTS

transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}


def both(folder, **options):
    return HuggingFaceTokenizer(folder, **options), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        ({}, None),
        ({}, "<s> $A"),
        ({}, "<s> $A </s>"),
        ({"add_bos_token": True}, None),
        ({"add_bos_token": True, "add_eos_token": True}, None),
        ({"add_bos_token": False, "add_eos_token": False}, "<s> $A </s>"),
        ({"pad_token": "<pad>", "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True}}, None),
        ({"additional_special_tokens": ["<|user|>", "<|tool|>"]}, "<s> $A"),
        ({"added_tokens_decoder": {"350": {"content": "<more>", "special": False, "normalized": True}}}, None),
    ],
)
def test_ids_equal_transformers(tmp_path, settings, template):
    """Tokens that only the settings name, and what is added to a text."""
    ours, theirs = both(files.hugging_face(tmp_path / "t", {**NAMED, **settings}, template))
    assert ours.vocab == theirs.get_vocab() and ours.vocab_size == len(theirs)
    for text in [*TEXTS, "<|user|>a <mask> b<|tool|><more> <pad>", "</s>"]:
        assert ours.tokenize(text) == theirs(text)["input_ids"]
        assert ours.tokenize_batch([text, text]) == theirs([text, text])["input_ids"]
        assert ours.detokenize(ours.tokenize(text)) == theirs.decode(theirs(text)["input_ids"])
        assert ours.offsets([], text) == [a for a, _ in theirs(text, return_offsets_mapping=True)["offset_mapping"]]
    ids = {name: getattr(theirs, f"{name}_token_id") for name in ("unk", "bos", "eos", "pad", "mask", "cls", "sep")}
    assert {name.removesuffix("_token"): id for name, id in ours.special_tokens_dict.items()} == {
        name: id for name, id in ids.items() if id is not None
    }
    bare = HuggingFaceTokenizer(str(tmp_path / "t"), include_special_tokens=False)
    assert bare.tokenize(TEXTS[0]) == theirs(TEXTS[0], add_special_tokens=False)["input_ids"]
    assert ours.appends_eod == (theirs("a")["input_ids"][-1] == theirs.eos_token_id) and not bare.appends_eod


def test_a_document_is_never_cut_or_padded(tmp_path):
    """A tokenizer.json keeps the truncation and padding of whoever saved it: documents would lose their ends."""
    folder = files.hugging_face(tmp_path / "t", NAMED)
    saved = Tokenizer.from_file(f"{folder}/tokenizer.json")
    saved.enable_truncation(5)
    saved.enable_padding(length=200)
    saved.save(f"{folder}/tokenizer.json")
    ours, theirs = both(folder)
    assert ours.tokenize(TEXTS[0]) == theirs(TEXTS[0])["input_ids"] and len(ours.tokenize(TEXTS[0])) > 5
    assert ours.tokenize_batch([TEXTS[0], "a"])[1] == ours.tokenize("a") and len(ours.tokenize("a")) == 1


def test_C001_an_empty_text_has_no_token_whatever_is_added_to_others(tmp_path):
    tokenizer = HuggingFaceTokenizer(files.hugging_face(tmp_path / "t", NAMED, "<s> $A </s>"))
    assert tokenizer.tokenize("") == [] and tokenizer.tokenize_batch(["", "a"])[0] == []
    assert tokenizer.offsets([], "") == [] and tokenizer.adds_tokens
    assert not HuggingFaceTokenizer(str(tmp_path / "t"), include_special_tokens=False).adds_tokens


def test_C007_a_tokenizer_without_an_end_names_itself_and_the_flag(tmp_path):
    tokenizer = HuggingFaceTokenizer(files.hugging_face(tmp_path / "t", {"bos_token": "<s>"}))
    with pytest.raises(ConfigError, match="has no eos token") as error:
        _ = tokenizer.eod
    assert str(tmp_path / "t") in error.value.what and "--append-eod" in error.value.why
    assert tokenizer.special_tokens_dict == {"bos_token": 1}


@pytest.mark.parametrize(
    ("settings", "template", "appends"),
    [
        ({}, "$A </s>", True),
        ({"bos_token": "</s>"}, "</s> $A", False),  # C009: begin and end are one token, and it stands in front
        ({"bos_token": "</s>"}, "</s> $A </s>", True),
        ({}, None, False),
    ],
)
def test_C008_C009_one_end_token_whoever_adds_it(tmp_path, settings, template, appends):
    tokenizer = HuggingFaceTokenizer(files.hugging_face(tmp_path / "t", {**NAMED, **settings}, template))
    assert tokenizer.eod == 2 and tokenizer.appends_eod == appends
    ids = tokenizer.tokenize("the cat")
    document = ids if tokenizer.appends_eod else [*ids, tokenizer.eod]  # as `megatron-lite preprocess` does
    assert document[-1] == 2 and document[1:].count(2) == 1


@pytest.mark.parametrize("pad", ["</s>", "<pad>", None])
def test_C030_padding_that_is_the_end_token_leaves_ends_of_documents_in_the_loss(tmp_path, pad, capsys):
    named = {**NAMED, **({"pad_token": pad} if pad else {})}
    tokenizer = HuggingFaceTokenizer(files.hugging_face(tmp_path / "t", named))
    documents = [[*tokenizer.tokenize(text), tokenizer.eod] for text in ("the cat", "a dog", "far", "and so on")]
    prefix = write_corpus(tmp_path / "c", documents)
    dataset = build(([prefix], None), split="0,1,0", drop_last_partial_validation_sequence=False, tokenizer=tokenizer)[
        1
    ]
    trained = padded = 0
    for sample in (dataset[i] for i in range(len(dataset))):
        trained += int(sample["loss_mask"][sample["labels"] == tokenizer.eod].sum())
        padded += int((sample["loss_mask"] == 0).sum())
    tokens = sum(map(len, documents))
    samples = len(dataset)
    assert trained == 4  # every document's end is predicted
    assert padded == samples * len(dataset[0]["labels"]) - (tokens - 1)  # and nothing but padding is left out
    assert ("it is not taken for padding" in capsys.readouterr().err) == (pad == "</s>")


def test_tokens_of_the_user_come_after_the_vocabulary(tmp_path):
    folder = files.hugging_face(tmp_path / "t", NAMED)
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder, vocab_extra_ids=2)
    config.tokenizer_special_tokens = ["<think>", "<|user|>"]
    tokenizer = build_tokenizer(config)
    assert tokenizer.tokenize("<|user|><think>") == [3, 350] and tokenizer.additional_special_tokens_ids == [351, 352]


def test_sentinels_of_the_vocabulary_keep_their_ids(tmp_path):
    """T5's own tokenizer counts them downwards."""
    settings = {**NAMED, "additional_special_tokens": ["<extra_id_1>", "<extra_id_0>"]}
    tokenizer = HuggingFaceTokenizer(files.hugging_face(tmp_path / "t", settings), vocab_extra_ids=3)
    assert tokenizer.additional_special_tokens_ids == [351, 350, 352] and tokenizer.vocab_size == 353


# -- chats ------------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hi <there>"}, {"role": "assistant", "content": "\u20ac 5"}]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}",
    "blocks": "{%- for m in messages %}\n  {%- if m.role == 'skip' %}\n  {%- continue %}\n  {%- endif %}\n"
    "    {% if loop.first %}\n<|user|>\n    {% endif %}\n{{ m | tojson }}\n{% endfor %}",
    "tools": "{{ tools | tojson(indent=2) }}{{ messages | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("where", ["config", "file", "flag", "flag with a file"])
def test_chats_equal_transformers(tmp_path, name, where):
    template = TEMPLATES[name]
    folder = files.hugging_face(tmp_path / "t", {**NAMED, **({"chat_template": template} if where == "config" else {})})
    if where == "file":
        (tmp_path / "t/chat_template.jinja").write_text(template)
    (tmp_path / "other.jinja").write_text(template)
    given = {"flag": template, "flag with a file": str(tmp_path / "other.jinja")}.get(where)
    ours = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder, chat_template=given)
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = template
    tools = [{"name": "a", "description": "b < c"}]
    for prompt in (False, True):
        text = ours.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False, tools=tools)
        assert text == theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, tokenize=False, tools=tools)
        ids = ours.apply_chat_template(CHAT, add_generation_prompt=prompt, tools=tools)
        assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=prompt, tools=tools)["input_ids"]


def test_of_several_templates_the_default_counts(tmp_path):
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages | length }}"}]
    tokenizer = HuggingFaceTokenizer(files.hugging_face(tmp_path / "t", {**NAMED, "chat_template": several}))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "2"
    assert tokenizer.apply_chat_template(CHAT, chat_template="{{ messages[0].role }}", tokenize=False) == "user"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('users first') }}", "users first"),
        ("{% if %}", "refuses a conversation of 2 messages"),
        ("{{ messages.append(1) }}", "refuses a conversation"),  # the sandbox
        ("{{ ''.__class__.__mro__ }}", "refuses a conversation"),
    ],
)
def test_a_template_that_refuses_is_an_error_of_the_data(tmp_path, template, message):
    tokenizer = HuggingFaceTokenizer(files.hugging_face(tmp_path / "t", NAMED), chat_template=template)
    with pytest.raises(DataError, match=message):
        tokenizer.apply_chat_template(CHAT)


def test_a_template_that_is_missing_is_named(tmp_path):
    folder = files.hugging_face(tmp_path / "t", NAMED)
    with pytest.raises(ConfigError, match="has no chat template"):
        HuggingFaceTokenizer(folder).apply_chat_template(CHAT)
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder, chat_template="nothere")
    with pytest.raises(DataError, match="--chat-template nothere"):
        build_tokenizer(config)
    assert unread_flags(TokenizerConfig(tokenizer_type="ByteTokenizer", chat_template="x")) == ["--chat-template"]


# -- tokenizers in Python ---------------------------------------------------------------------------------------------


def test_the_python_tokenizer_of_transformers(tmp_path):
    """ByT5's tokenizer exists in Python alone."""
    theirs = transformers.ByT5Tokenizer(extra_ids=5)
    theirs.save_pretrained(tmp_path)
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(DataError, match="tokenizer.json"):
        build_tokenizer(config)
    config.tokenizer_hf_no_use_fast, config.vocab_extra_ids = True, 5
    ours = build_tokenizer(config)
    assert (ours.vocab_size, ours.eod, ours.pad) == (len(theirs), theirs.eos_token_id, theirs.pad_token_id)
    for text in TEXTS:
        assert ours.tokenize(text) == theirs(text)["input_ids"]
        assert ours.detokenize(ours.tokenize(text)) == f"{text}</s>"
    assert ours.appends_eod
    assert ours.additional_special_tokens_ids == theirs.convert_tokens_to_ids([f"<extra_id_{i}>" for i in range(5)])
    config.tokenizer_hf_no_include_special_tokens = True
    assert build_tokenizer(config).tokenize("a") == theirs("a", add_special_tokens=False)["input_ids"]


def test_a_python_tokenizer_that_is_gone_is_said(tmp_path):
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_hf_no_use_fast=True)
    config.tokenizer_model = files.hugging_face(tmp_path / "t", NAMED)
    with pytest.raises(ConfigError, match="no other than the fast tokenizer"):
        build_tokenizer(config)
    config.tokenizer_model = str(tmp_path)
    with pytest.raises(DataError, match="cannot be read by transformers"):
        build_tokenizer(config)


def test_settings_that_are_torn_are_named(tmp_path):
    folder = files.hugging_face(tmp_path / "t", NAMED)
    for content in ("{", "[1]", json.dumps([["a"]])):
        (tmp_path / "t/tokenizer_config.json").write_text(content)
        with pytest.raises(DataError, match="tokenizer_config.json is not a JSON object"):
            HuggingFaceTokenizer(folder)
