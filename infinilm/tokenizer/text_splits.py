"""How text is cut into words before bytes are merged: a row for each name that GGUF files have for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True)
class TextSplit:
    """How a family of models cuts text into words before merging, and what else its name implies."""

    steps: Sequence[pre_tokenizers.PreTokenizer]
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    adds_bos: bool = False


def _isolate(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

_DIGITS = pre_tokenizers.Digits(individual_digits=True)

# Llama 3 and Qwen 2 differ in nothing but how many digits make a word.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
# Seed keeps line breaks apart from the signs before them.
_SEED = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
# Qwen 3.5 keeps marks with the letters before them.
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Tekken and GPT-4o cut words before capital letters; GPT-4o has contractions in them, and digits in threes.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITAL, _CAPITALS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_CAPITAL}|{_CAPITALS}|\p{{N}}|{_SIGNS}"
_GPT4O = rf"{_CAPITAL}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS}"
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# DeepSeek's first models take line breaks out, then words of some scripts, then signs, then the East's.
_EAST = r"[一-龥ࠀ-一가-퟿]+"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-Ჺ"
    "Ჽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓ"
    "ℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, r"\p{N}")
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _EAST, r"\p{N}+")

# DeepSeek's later models, and Hunyuan, take digits out, then words of the East; a sign may begin a word.
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)

_LLAMA3_SPLIT = TextSplit([_isolate(_LLAMA3), _TO_BYTES], ignore_merges=True, adds_bos=True)
_QWEN2_SPLIT = TextSplit([_isolate(_QWEN2), _TO_BYTES], normalizer=normalizers.NFC())
_CL100K_SPLIT = TextSplit([_isolate(_LLAMA3), _TO_BYTES])
_GPT4O_SPLIT = TextSplit([_isolate(_GPT4O), _TO_BYTES])
_STARCODER_SPLIT = TextSplit([_DIGITS, _GPT2_WORDS])
_DEEPSEEK3_SPLIT = TextSplit([*map(_isolate, _DEEPSEEK3), _TO_BYTES])
_NEOX_SPLIT = TextSplit([_GPT2_WORDS], normalizer=normalizers.NFC())

# The known values of tokenizer.ggml.pre: "default" is GGUF's own, the others are as in their tokenizer.json.
# A name is that of the model it was first seen in; who else has it, if we know of one, stands behind it.
TEXT_SPLITS = {
    "default": TextSplit([*map(_isolate, _DEFAULT), _TO_BYTES]),
    "gpt-2": TextSplit([_GPT2_WORDS]),
    "phi-2": TextSplit([_GPT2_WORDS]),
    "smollm": _STARCODER_SPLIT,
    "starcoder": _STARCODER_SPLIT,
    "refact": _STARCODER_SPLIT,  # Granite 3
    "a.x-4.0": TextSplit([_GPT2_WORDS]),
    "gigachat": TextSplit([_GPT2_WORDS]),
    "mellum": TextSplit([_GPT2_WORDS]),
    "olmo": _NEOX_SPLIT,  # OLMoE
    "mpt": _NEOX_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "midm-2.0": _LLAMA3_SPLIT,
    "pixtral": _LLAMA3_SPLIT,
    "smaug-bpe": replace(_LLAMA3_SPLIT, adds_bos=False),  # SmolLM3
    "dbrx": _CL100K_SPLIT,  # OLMo 2, Phi-4
    "chatglm-bpe": _CL100K_SPLIT,
    "glm4": replace(_CL100K_SPLIT, ignore_merges=True),
    "qwen2": _QWEN2_SPLIT,  # and Qwen 3, mixtures too
    "qwen35": TextSplit([_isolate(_QWEN35), _TO_BYTES], normalizer=normalizers.NFC()),
    "deepseek-llm": TextSplit([*map(_isolate, _DEEPSEEK), _TO_BYTES]),
    "deepseek-coder": TextSplit([*map(_isolate, _DEEPSEEK_CODER), _TO_BYTES]),
    "deepseek-r1-qwen": replace(_QWEN2_SPLIT, normalizer=None),
    "deepseek-v3": _DEEPSEEK3_SPLIT,  # and DeepSeek R1
    "exaone4": TextSplit([_GPT2_WORDS]),
    "hunyuan-dense": _DEEPSEEK3_SPLIT,
    "tekken": TextSplit([_isolate(_TEKKEN), _TO_BYTES], ignore_merges=True, adds_bos=True),
    "seed-coder": TextSplit([_isolate(_SEED), _TO_BYTES]),  # Seed-OSS
    "gpt-4o": _GPT4O_SPLIT,  # Phi-4-mini, GPT-OSS
    "kanana2": _GPT4O_SPLIT,
    "llama4": _GPT4O_SPLIT,
}
