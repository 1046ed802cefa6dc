"""Text as token ids: bytes, or a byte-pair vocabulary from local files.

    tokenizer = load_tokenizer("r50k_base.tiktoken")  # GPT-2's ranks
    tokenizer.encode("Hello")  # [15496]

Nothing is ever fetched. Text that looks like a special token is text: only the caller puts
`tokenizer.eot` between documents.
"""

import base64
import binascii
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence

# GPT-2's; a ranks file does not say by which pattern text is split before its bytes are merged.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
_GPT2_RANKS = 50256
_END_OF_TEXT = ("<|endoftext|>", "</s>")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
        name: where it came from.
        vocab_size: ids are less than it.
        eot: the id that ends a document.
        encode: text -> ids, without any special ones.
        decode: ids -> text; bytes that are no UTF-8 become U+FFFD.
        fingerprint: the same for equal tokenizers, wherever their files are.
    """

    name: str
    vocab_size: int
    eot: int
    encode: Callable[[str], list[int]] = dataclasses.field(repr=False)
    decode: Callable[[Sequence[int]], str] = dataclasses.field(repr=False)
    fingerprint: str

    def check_fits(self, vocab_size: int) -> None:
        """Make sure that a model with so many ids can read this tokenizer's text.

        Raises:
            ValueError: naming both sizes.
        """
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer {self.name} has {self.vocab_size} ids, the model {vocab_size}: "
                "give the tokenizer that the model was trained with."
            )


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `source` names.

    Args:
        source: `bytes`: ids 0 to 255 are bytes of UTF-8, 256 ends a document. A `.tiktoken` file:
            ranks to use with GPT-2's splitting of text, end of text comes after them. A folder
            with `vocab.json` and `merges.txt`, GPT-2's original files, or with `tokenizer.json`,
            or one of these three files.

    Raises:
        FileNotFoundError: naming what was looked for.
        ValueError: for files that do not make a tokenizer.
        ImportError: if tiktoken (for ranks) or tokenizers (for a folder) is not installed.
    """
    if source == "bytes":
        return Tokenizer("bytes", 257, 256, _encode_bytes, _decode_bytes, "bytes")
    path = pathlib.Path(source)
    if path.suffix == ".tiktoken":
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer={source}: there is no such file.")
        return _from_ranks(path)
    folder = path if path.suffix not in (".json", ".txt") else path.parent
    both, whole = ("vocab.json", "merges.txt"), "tokenizer.json"
    if all((folder / name).is_file() for name in both) and path.name != whole:
        return _from_folder(folder, both)
    if (folder / whole).is_file():
        return _from_folder(folder, (whole,))
    raise FileNotFoundError(
        f"tokenizer={source}: looked in {folder.absolute()} for {both[0]} with {both[1]}, and for "
        f"{whole}, and found neither; `bytes` needs no files."
    )


def _encode_bytes(text):
    return list(text.encode())


def _decode_bytes(ids):
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def _from_ranks(path):
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError("ranks in .tiktoken files need `pip install tiktoken`.") from error
    content = path.read_bytes()
    try:
        pairs = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"tokenizer={path} has a line that is no token and rank.") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"tokenizer={path}: ranks are not 0, 1, 2, ...: the file is damaged.")
    if len(ranks) > _GPT2_RANKS:
        raise ValueError(
            f"tokenizer={path} has {len(ranks)} ranks, more than GPT-2's {_GPT2_RANKS}: they go "
            "with another splitting of text, which a ranks file does not hold; give tokenizer.json."
        )
    eot = len(ranks)
    coding = tiktoken.Encoding(
        str(path), pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={_END_OF_TEXT[0]: eot}
    )
    fingerprint = hashlib.sha256(content).hexdigest()
    return Tokenizer(
        str(path), eot + 1, eot, coding.encode_ordinary, coding.decode, fingerprint[:16]
    )


def _from_folder(folder, names):
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"{', '.join(names)} need `pip install tokenizers`.") from error
    try:
        if len(names) == 2:
            coding = tokenizers.ByteLevelBPETokenizer.from_file(
                *(str(folder / name) for name in names)
            )
        else:
            coding = tokenizers.Tokenizer.from_file(str(folder / names[0]))
            coding.no_padding()
            coding.no_truncation()
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(
            f"tokenizer={folder}: {', '.join(names)} cannot be read: {error}"
        ) from error
    ends = [i for i in map(coding.token_to_id, _END_OF_TEXT) if i is not None]
    if not ends:
        raise ValueError(f"tokenizer={folder} has no end of text: {' or '.join(_END_OF_TEXT)}.")
    content = b"".join((folder / name).read_bytes() for name in names)
    return Tokenizer(
        str(folder),
        1 + max(coding.get_vocab().values()),
        ends[0],
        functools.partial(_encode, coding),
        functools.partial(_decode, coding),
        hashlib.sha256(content).hexdigest()[:16],
    )


def _encode(coding, text):
    coding.encode_special_tokens = True  # as text; a copy in another process forgets it
    return coding.encode(text, add_special_tokens=False).ids


def _decode(coding, ids):
    return coding.decode(list(ids), skip_special_tokens=False)
