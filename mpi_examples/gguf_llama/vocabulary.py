"""The tokenizer: byte-pair encoding built from the tokens, merges and scores in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from gguf_llama.errors import LlamaError
from gguf_llama.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Vocabulary"]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# What tokenizer.ggml.pre may name: the patterns that cut text into pieces, one after the other, before any merge.
_PIECES = {
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a GGUF file says about text and tokens; plain data, so that it can move between processes.

    Parameters
    ----------
    tokenizer : str
        A ``tokenizers.Tokenizer``, as JSON.
    bos : int or None
        Token that begins every prompt, if one does.
    ends : tuple of int
        Tokens that end an answer.
    chat_template : str
        The file's own, in jinja; empty if there is none.
    """

    tokenizer: str
    bos: int | None
    ends: tuple[int, ...]
    chat_template: str

    @classmethod
    def of(cls, file: GGUFFile) -> Vocabulary:
        """Read the vocabulary of ``file``.

        Raises
        ------
        LlamaError
            It names a kind of tokenizer, or of splitting text before it, that is not known here.
        """
        model = file.get("tokenizer.ggml.model", str)
        if model not in ("gpt2", "llama"):
            raise LlamaError(f"{file.path} has a tokenizer of kind {model!r}; only 'gpt2' and 'llama' are known here")
        tokenizer = _byte_level(file) if model == "gpt2" else _sentencepiece(file)
        _add_special_tokens(tokenizer, file)
        starts = model == "llama" or file.get("tokenizer.ggml.pre", str, "default") == "llama-bpe"
        bos, *ends = (_token(file, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot"))
        return cls(
            tokenizer=tokenizer.to_str(),
            bos=bos if file.get("tokenizer.ggml.add_bos_token", bool, starts) else None,
            ends=tuple(token for token in ends if token is not None),
            chat_template=file.get("tokenizer.chat_template", str, ""),
        )

    def load(self) -> Tokenizer:
        """Make the tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.tokenizer)

    def encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Turn text into tokens; the names of special tokens in it become those tokens."""
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.bos is None or ids[:1] == [self.bos] else [self.bos, *ids]


def _byte_level(file: GGUFFile) -> Tokenizer:
    """GPT-2's way: bytes as characters, merges in the file's order."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in _PIECES:
        known = ", ".join(_PIECES)
        raise LlamaError(f"{file.path} splits text by {name!r} before merging; only {known} are known here")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get_all("tokenizer.ggml.merges", str)]
    ids = _ids_of(file)
    for merge in merges:
        if len(merge) != 2 or not ids.keys() >= {*merge, "".join(merge)}:
            raise LlamaError(f"{file.path}: tokenizer.ggml.merges: expected pairs of tokens that make one, got {merge}")
    # Llama 3 takes a piece that is a token as it is, without trying to reach it by merges.
    bpe = models.BPE(ids, merges, ignore_merges=name == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PIECES[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """Llama 1 and 2's way: the pair whose union scores highest merges first; unknown characters fall back to bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = _ids_of(file)
    unknown = _tokens(file)[_token(file, "tokenizer.ggml.unknown_token_id") or 0]
    bpe = models.BPE(ids, _merges_by_score(file, ids), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if prefix else [space])
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def _merges_by_score(file: GGUFFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    tokens, scores = _tokens(file), _per_token(file, "scores", (int, float))
    normal = [kind == _NORMAL for kind in _per_token(file, "token_type", int, _NORMAL)]
    found = []
    for token, score, counts in zip(tokens, scores, normal, strict=True):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token) if counts else 0))
        found += [(-score, ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids]
    return [(left, right) for *_, left, right in sorted(found)]


def _ids_of(file: GGUFFile) -> dict[str, int]:
    return {token: number for number, token in enumerate(_tokens(file))}


def _tokens(file: GGUFFile) -> list[str]:
    return file.get_all("tokenizer.ggml.tokens", str)


def _per_token(file: GGUFFile, name: str, kind: type | tuple[type, ...], *default: Any) -> list[Any]:
    """Read what there must be one of for each token."""
    tokens = len(_tokens(file))
    values = file.get_all(f"tokenizer.ggml.{name}", kind, *([each] * tokens for each in default))
    if len(values) != tokens:
        raise LlamaError(
            f"{file.path}: tokenizer.ggml.{name}: expected one for each of {tokens} tokens, got {len(values)}"
        )
    return values


def _token(file: GGUFFile, key: str) -> int | None:
    """Read the number of a token, if it is told."""
    number, tokens = file.get(key, int, None), len(_tokens(file))
    if number is not None and not 0 <= number < tokens:
        raise LlamaError(f"{file.path}: {key}: expected one of {tokens} tokens, got {number}")
    return cast("int | None", number)


def _add_special_tokens(tokenizer: Tokenizer, file: GGUFFile) -> None:
    """Make tokens such as <|im_start|> stand for themselves wherever their name appears in a text."""
    from tokenizers import AddedToken

    tokens, kinds = _tokens(file), _per_token(file, "token_type", int, _NORMAL)
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        named = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in named])
