"""`megatron-lite convert`: Hugging Face model <-> checkpoint, tensor by tensor, whichever way the folders are.

    --load-dir a Hugging Face folder:   config.json --flags--> arguments    files --rows--> SAVE_DIR/release
    --load-dir Megatron-LM's torch_dist folder: convert_megatron
    --load-dir a folder of checkpoints: args.json --config.json             boxes --rows--> SAVE_DIR/model.safetensors

About one tensor is in memory at a time. Tensors that no row reads, and rows that no tensor fills, are errors before
anything is written. The checkpoint has no layout: any run reads its boxes of it.
"""

from __future__ import annotations

import argparse
import io
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.checkpoint import read_args
from megatron_lite.checkpointing.huggingface import CONFIG, TOKENIZER_FILES, HuggingFaceFolder, read_json, write_folder
from megatron_lite.checkpointing.megatron_dist import is_megatron_dist
from megatron_lite.checkpointing.sharded import LateTensor, Reader, SavedTensor, read, saved_tensors
from megatron_lite.cli.convert_megatron import import_megatron
from megatron_lite.cli.progress import progress
from megatron_lite.cli.release import check_no_run, write_release
from megatron_lite.config import from_namespace
from megatron_lite.datasets.t5_dataset import first_and_last
from megatron_lite.errors import CheckpointError, ConfigError, MegatronLiteError
from megatron_lite.models.gpt.hf_family import Family
from megatron_lite.models.gpt.hf_names import Link, Sizes, is_buffer, links
from megatron_lite.models.hf_families import FAMILIES, family_of, fitting_family
from megatron_lite.sharding import whole
from megatron_lite.tokenizers import TokenizerConfig
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer, vocab_size_with_padding
from megatron_lite.training import global_vars
from megatron_lite.training.checkpoint_args import args_to_save, is_fp8_history
from megatron_lite.training.checkpoint_search import find_in
from megatron_lite.training.entry import read_arguments
from megatron_lite.training.families import FAMILIES as RUN_FAMILIES

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Asked of every run and said by no model: these are no part of what is saved.
_RUN = ("--micro-batch-size", "1", "--train-iters", "1", "--lr", "1")


# -- Hugging Face -> ours ------------------------------------------------------------------------------------------


def import_model(source: Path, root: Path, tokenizer: Path | None, dtype: torch.dtype | None, flags: list[str]) -> Path:
    """Write the model of a Hugging Face folder as `root/release`.

    Args:
        tokenizer: folder or file with its tokenizer; None: `source`, if there is one.
        dtype: of the tensors; None: as they are.
        flags: further flags of training, which win over what config.json says.
    Returns: the folder of the checkpoint.
    Raises: ConfigError, CheckpointError, DataError.
    """
    check_no_run(root)
    config = read_json(source / CONFIG)
    family = family_of(config)
    rows = config.get("vocab_size")
    if not isinstance(rows, int):
        raise ConfigError(f"{source / CONFIG} has vocab_size = {rows!r}", fix="the number of rows of the embedding")
    if family.ends is None:
        family.to_flags(config)  # what cannot be is said before gigabytes are looked for
    theirs = HuggingFaceFolder(source)
    found = theirs.tensors
    if family.ends is not None:
        config = {**config, "output_is_embedding": _are_one(theirs, *family.ends)}
    words = family.to_flags(config)
    words += _tokenizer_flags(config, source, tokenizer, rows, _extra_ids(words))
    args = model_arguments([*words, *flags], family.model_family)
    saved = args_to_save(args)
    sizes = Sizes.of(saved, rows)
    model = links(family.rows, saved, sizes)
    names = _their_names(theirs, model, family)

    def join(link: Link, read: Callable[[str], Tensor]) -> Tensor:
        joined = link.form.join((read(names[name]) for name in link.theirs), sizes)
        return joined.to(dtype or joined.dtype)

    late: dict[str, LateTensor] = {}
    total = sum(_count(facts) * facts.dtype.itemsize for facts in found.values())
    with progress("converting", total / 1e6, "MB") as advance:
        for link in model:
            try:
                planned = join(link, lambda name: _meta(found[name]))
                fits = tuple(planned.shape) == link.shape
            except RuntimeError:  # a view that does not come out even
                fits = False
            if not fits:
                shapes = ", ".join(f"{name} {list(found[names[name]].shape)}" for name in link.theirs)
                raise CheckpointError(
                    f"{source}: {shapes}",
                    why=f"{CONFIG} means {list(link.shape)} for {link.ours}, which is made of it",
                    fix="a folder whose config.json belongs to its weights",
                )

            def make(link: Link = link) -> Tensor:
                tensor = join(link, theirs.read)
                advance(tensor.numel() * tensor.element_size() / 1e6)
                return tensor

            late[link.ours] = LateTensor(link.ours, SavedTensor(link.shape, planned.dtype), make)
        return write_release(root, late, saved, source)


def _meta(facts: SavedTensor) -> Tensor:
    return torch.empty(facts.shape, dtype=facts.dtype, device="meta")


def _are_one(theirs: HuggingFaceFolder, embedding: str, output: str) -> bool:
    """Whether the output layer is the embedding: the same numbers, or none of its own."""
    if output not in theirs.tensors or embedding not in theirs.tensors:
        return True
    return torch.equal(theirs.read(output), theirs.read(embedding))


def _extra_ids(words: Sequence[str]) -> int:
    return int(words[words.index("--vocab-extra-ids") + 1]) if "--vocab-extra-ids" in words else 0


def _tokenizer_flags(
    config: Mapping[str, Any], source: Path, tokenizer: Path | None, rows: int, extra_ids: int
) -> list[str]:
    """The tokenizer beside the weights; without one, texts are numbers, and sentinels the last ones."""
    place = tokenizer if tokenizer is not None else source if (source / "tokenizer.json").is_file() else None
    if place is None and (source / "vocab.txt").is_file():
        return ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str((source / "vocab.txt").resolve())]
    if place is not None and place.suffix == ".txt":
        return ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(place.resolve())]
    if place is not None:
        kind = "SentencePieceTokenizer" if place.suffix == ".model" else "HuggingFaceTokenizer"
        return ["--tokenizer-type", kind, "--tokenizer-model", str(place.resolve()), "--vocab-size", str(rows)]
    words = ["--tokenizer-type", "NullTokenizer"]
    words += ["--vocab-size", str(rows - extra_ids - 1)]  # to which it adds an end of document
    pad = config.get("pad_token_id")
    if extra_ids and isinstance(pad, int):  # which T5's decoder begins with
        words += ["--null-tokenizer-pad-id", str(pad)]
    end = config.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    known = isinstance(end, int) and 0 <= end < rows - extra_ids
    return [*words, "--null-tokenizer-eod-id", str(end)] if known else words


def model_arguments(words: list[str], model_family: str) -> Namespace:
    """A run's arguments, checked by the rules of a run of this kind of model, with the padded vocabulary."""
    if "--make-vocab-size-divisible-by" not in words:
        # No padding unless it is asked for: padded rows take part in the softmax.
        words = [*words, "--make-vocab-size-divisible-by", "1"]
    with redirect_stdout(io.StringIO()):
        args = read_arguments(argv=[*_RUN, *words], args_defaults={"model_family": model_family})
        global_vars.build_tokenizer(args)
    return args


def _their_names(theirs: HuggingFaceFolder, model: Sequence[Link], family: Family) -> dict[str, str]:
    """Name in the rows -> name in the folder, for every tensor.

    Args:
        family: its `copies` may lie beside the tensor whose copy they are; where a row reads them, they are none.
    Raises: CheckpointError naming what is left over.
    """
    found = theirs.tensors
    wanted = {name for link in model for name in link.theirs}
    # GPT-2's own folders hold the body of the model, without the name that it has inside of GPT2LMHeadModel.
    bare = not any(name.startswith("transformer.") for name in found)
    names = {name: name.removeprefix("transformer.") if bare else name for name in wanted}
    if family.ends is not None and family.ends[1] not in found:  # the embedding is the output layer, and there once
        names |= {family.ends[1]: family.ends[0]} if family.ends[1] in names else {}
    tied = {copy: of for copy, of in family.copies.items() if copy in found and copy not in wanted}
    missing = sorted(name for name in names.values() if name not in found)
    left = sorted(name for name in found.keys() - tied.keys() - set(names.values()) if not is_buffer(name))
    if missing or left:
        lines = [f"    {len(missing)} missing: {_some(missing)}"] if missing else []
        lines += [f"    {len(left)} that nothing here reads: {_some(left)}"] if left else []
        raise CheckpointError(
            f"the tensors of {theirs.folder} are not those of its {CONFIG}:\n" + "\n".join(lines),
            why="a model with weights left out, or left at random values, would be another model",
            fix="the complete folder of one model, as save_pretrained writes it",
        )
    for copy, of in tied.items():
        if not torch.equal(theirs.read(copy), theirs.read(names[of])):
            raise CheckpointError(
                f"{theirs.folder}: {copy} is not {names[of]}",
                why=f"{CONFIG} says that they are tied (tie_word_embeddings)",
                fix=f'"tie_word_embeddings": false in {CONFIG}, if the weights are right',
            )
    return names


# -- ours -> Hugging Face ------------------------------------------------------------------------------------------


def export_model(
    load: Path,
    folder: Path,
    *,
    ckpt_step: int | None = None,
    model_type: str | None = None,
    tokenizer: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 << 30,
) -> Path:
    """Write a checkpoint's model as a Hugging Face folder.

    Args:
        ckpt_step: the iteration; None: the one that the tracker names.
        model_type: "llama", ...; None: the first family that computes what this model does.
        tokenizer: folder whose tokenizer goes along; None: the one that the model was trained with, if it is one.
        dtype: of the tensors; None: as they are.
        shard_bytes: largest size of one file.
    Returns: the checkpoint that was read.
    Raises: ConfigError, CheckpointError.
    """
    source_folder = find_in(load, ckpt_step, "--load-dir")
    folders.read_manifest(source_folder)
    args = read_args(source_folder)
    family = fitting_family(args, model_type)
    files = _tokenizer_files(args, tokenizer)
    vocabulary, special = _vocabulary(args, family)
    sizes = Sizes.of(args, vocabulary)
    config = family.to_config(args, sizes)
    model = links(family.rows, args, sizes)

    saved = {
        name: facts
        for name, facts in saved_tensors(source_folder).items()
        if not name.startswith("optimizer.") and not is_fp8_history(name)
    }
    lines = [
        *(f"{link.ours} is missing" for link in model if link.ours not in saved),
        *(f"nothing reads {name}" for name in sorted(saved.keys() - {link.ours for link in model})),
        *(
            f"{link.ours} has shape {list(saved[link.ours].shape)}, not {list(link.shape)}"
            for link in model
            if link.ours in saved and saved[link.ours].shape != link.shape
        ),
    ]
    if lines:
        raise CheckpointError(
            f"the tensors of {source_folder} are no {family.model_type} model's:\n    " + _some(lines, "\n    "),
            why="a model with weights left out would be another model",
            fix="another --hf-model-type",
        )

    planned: dict[str, SavedTensor] = {}
    source: dict[str, tuple[Link, int]] = {}
    for link in model:
        kind = dtype or saved[link.ours].dtype
        for number, part in enumerate(link.form.divide(_meta(saved[link.ours]), sizes)):
            planned[link.theirs[number]] = SavedTensor(tuple(part.shape), kind)
            source[link.theirs[number]] = link, number
    dtypes = {facts.dtype for facts in planned.values()}
    config["torch_dtype"] = str(next(iter(dtypes)) if len(dtypes) == 1 else torch.float32).removeprefix("torch.")

    reader = Reader(source_folder)
    held: dict[str, Tensor] = {}  # the tensor of ours that the last one of theirs came from: parts follow each other
    total = sum(facts.dtype.itemsize * _count(facts) for facts in planned.values())
    with progress("converting", total / 1e6, "MB") as advance:

        def produce(name: str) -> Tensor:
            link, number = source[name]
            if link.ours not in held:
                held.clear()
                tensor = torch.empty(link.shape, dtype=saved[link.ours].dtype)
                place = {link.ours: (tensor, whole(link.ours, link.shape))}
                read(source_folder, place, expected=lambda key: False, reader=reader)
                held[link.ours] = tensor
            part = link.form.divide(held[link.ours], sizes)[number].to(planned[name].dtype)
            advance(part.numel() * part.element_size() / 1e6)
            return part

        write_folder(folder, {**config, **special}, planned, produce, copies=files, shard_bytes=shard_bytes)
    return source_folder


def _vocabulary(args: Mapping[str, Any], family: Family) -> tuple[int, dict[str, int]]:
    """The tokens that the vocabulary really has, and its special tokens as config.json names them."""
    config = from_namespace(
        TokenizerConfig, Namespace(**args), make_vocab_size_divisible_by=1, padded_vocab_size=None, pad_vocab_size=True
    )
    try:
        tokenizer = build_tokenizer(config)
    except MegatronLiteError as error:
        raise ConfigError(
            f"the tokenizer of the checkpoint cannot be read: {error.what}",
            why="it says which rows of the embedding are tokens and which are padding",
            fix="put it back to its place",
        ) from error
    special = {}
    for name in ("bos", "eos", "pad"):
        try:
            special[f"{name}_token_id"] = int(tokenizer.eod if name == "eos" else getattr(tokenizer, name))
        except (MegatronLiteError, NotImplementedError):  # a tokenizer without one
            continue
    if family.model_family == "t5":
        special["decoder_start_token_id"] = first_and_last(tokenizer)[0]
    return vocab_size_with_padding(tokenizer, config), special


def _tokenizer_files(args: Mapping[str, Any], tokenizer: Path | None) -> list[Path]:
    place = tokenizer
    if place is None and args.get("tokenizer_type") == "HuggingFaceTokenizer":
        place = Path(args["tokenizer_model"])
    if place is None:
        return []
    folder = place if place.is_dir() else place.parent
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if tokenizer is not None and not files:
        raise ConfigError(f"--tokenizer-model {tokenizer} holds no tokenizer", fix="a folder with tokenizer.json")
    return files


def _count(facts: SavedTensor) -> int:
    return math.prod(facts.shape)


def _some(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:6]) + (f"{between}and {len(names) - 6} more" if len(names) > 6 else "")


# -- the verb ------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The verb's own flags; on the way in, those of training work too."""
    parser = argparse.ArgumentParser(
        "megatron-lite convert",
        description="Hugging Face model -> checkpoint, or checkpoint -> Hugging Face model: what --load-dir holds "
        f"decides. Families: {', '.join(FAMILIES)}. On the way to a checkpoint, flags of training that "
        "describe a model, such as --seq-length or --make-vocab-size-divisible-by, work too.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--load-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="a Hugging Face folder, or what --save was, also Megatron-LM's (torch_dist)",
    )
    add("--save-dir", type=Path, required=True, metavar="DIR", help="what --load will be, or a new folder")
    add("--ckpt-step", type=int, metavar="N", help="this iteration of the checkpoints (default: the latest)")
    add("--tokenizer-model", type=Path, metavar="PATH", help="the tokenizer (default: the one of the model)")
    add("--dtype", choices=_DTYPES, help="of the tensors written (default: as they are)")
    add("--hf-model-type", choices=FAMILIES, help="family to write (default: the first that fits)")
    add("--max-shard-size", type=float, default=5.0, metavar="GB", help="largest file (default: %(default)s)")
    return parser


def _refuse_words_of_megatrons_tool(flags: Sequence[str]) -> None:
    for word in flags:
        name = word.split("=")[0]
        if name.startswith("--target-"):
            raise ConfigError(name, why="a checkpoint here has no layout: any run reads its part of it", fix="without")
        if name in ("--loader", "--saver", "--model-type", "--checkpoint-type", "--model-size"):
            why = f"what lies in --load-dir says it: {CONFIG} there means a Hugging Face model"
            raise ConfigError(name, why=why, fix="without")


def main(argv: Sequence[str]) -> int:
    """The verb."""
    args, flags = build_parser().parse_known_args(list(argv))
    dtype = _DTYPES[args.dtype] if args.dtype else None
    _refuse_words_of_megatrons_tool(flags)
    if not args.load_dir.is_dir():
        raise ConfigError(
            f"--load-dir {args.load_dir} is no folder",
            why="nothing is downloaded here",
            fix="a Hugging Face model on disk (config.json and safetensors files), or a folder of checkpoints",
        )
    inwards = (args.load_dir / CONFIG).is_file()
    if inwards:
        for spelling, value in (("--ckpt-step", args.ckpt_step), ("--hf-model-type", args.hf_model_type)):
            if value is not None:
                raise ConfigError(
                    f"{spelling} with --load-dir {args.load_dir}",
                    why="that is a Hugging Face folder",
                    fix="leave it out",
                )
        folder = import_model(args.load_dir, args.save_dir, args.tokenizer_model, dtype, flags)
        config = read_json(args.load_dir / CONFIG)
        family = family_of(config)
        if family.note(config):
            print(f"note: {family.note(config)}")
        script = RUN_FAMILIES[family.model_family].script
        print(f"wrote {folder}")
        print(f"train on:  {script} --load {args.save_dir} --use-checkpoint-args --finetune ...")
        print(f"look at:   megatron-lite generate --load {args.save_dir} --prompt ...")
        return 0
    folder = find_in(args.load_dir, args.ckpt_step, "--load-dir")
    if is_megatron_dist(folder):
        print(
            f"wrote {import_megatron(folder, args.save_dir, dtype, flags, model_arguments)} from Megatron-LM's {folder}"
        )
        print(f"train on:  pretrain_gpt.py --load {args.save_dir} --use-checkpoint-args --finetune ...")
        print(f"to Hugging Face: megatron-lite convert --load-dir {args.save_dir} --save-dir ...")
        return 0
    if flags:
        raise ConfigError(
            f"unknown: {' '.join(flags)}",
            why=f"{args.load_dir} has no {CONFIG}, so it is read as a folder of checkpoints, whose arguments are known",
            fix="megatron-lite convert --help",
        )
    if args.max_shard_size <= 0:
        raise ConfigError(f"--max-shard-size {args.max_shard_size}", fix="a positive number of GB")
    source = export_model(
        args.load_dir,
        args.save_dir,
        ckpt_step=args.ckpt_step,
        model_type=args.hf_model_type,
        tokenizer=args.tokenizer_model,
        dtype=dtype,
        shard_bytes=int(args.max_shard_size * 1e9),
    )
    print(f"wrote {args.save_dir} from {source}")
    return 0
