"""Makes tokenizers/: three small tokenizer.json files, a text, and the ids that Hugging Face gives.

    python -m venv venv && venv/bin/pip install tokenizers safetensors numpy unicodedata2==16.0.0
    venv/bin/python make_tokenizers.py [output folder, by default tokenizers/ beside this script]

The text is made up here, from a fixed seed: invented words, code, numbers, many scripts, all white
space there is, both ends of every range of letters and numbers in Unicode, and short random strings
over the characters that the patterns treat specially. The files are trained on it, and spelled as
those of GPT-2, SmolLM and Llama 3 are: pre-tokenizer, merges, added tokens, post-processor.
"""

import json
import pathlib
import random
import sys

import numpy
from make_unicode_tables import ranges_of
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 900
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACES = (
    [chr(c) for c in range(0x9, 0xE)]
    + list("\x20\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000")
    + [chr(c) for c in range(0x2000, 0x200B)]
)
NO_SPACES = "\u200b\ufeff\u180e\u2060\x1c\x1f\x00\x7f\u200d"  # look like white space, and are none
CONTRACTIONS = [
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "'S",
    "'T",
    "'RE",
    "'Ve",
    "'M",
    "'lL",
    "'D",
    "'\u017f",
    "'\u017ft",
    "\u2019s",
    "\u2019ll",
    "'x",
    "'r",
    "'l",
    "''s",
    "'v",
    "'",
]
# Numbers that Unicode 17 added: tokenizers' Digits knows them, its regular expressions do not yet.
TOO_NEW = set(range(0x11DE0, 0x11DEA)) | set(range(0x16FF4, 0x16FF7))

draw = random.Random(20)


def word():
    syllables = [
        "ba",
        "co",
        "der",
        "en",
        "fi",
        "gan",
        "ho",
        "is",
        "ju",
        "ka",
        "lo",
        "mer",
        "ne",
        "or",
        "pa",
        "qui",
        "ro",
        "st",
        "ta",
        "un",
        "ver",
        "wa",
        "ex",
        "yo",
        "za",
    ]
    return "".join(draw.choice(syllables) for _ in range(draw.choice([1, 1, 2, 2, 2, 3, 4])))


def prose(bytes_wanted):
    common = [word() for _ in range(60)]
    out = ""
    while len(out) < bytes_wanted:
        words = [
            draw.choice(common) if draw.random() < 0.7 else word()
            for _ in range(draw.randint(3, 14))
        ]
        words[0] = words[0].capitalize()
        for i in range(len(words)):
            if draw.random() < 0.12:
                words[i] += draw.choice(CONTRACTIONS)
            if draw.random() < 0.04:
                words[i] = words[i].upper()
            if draw.random() < 0.03:
                words[i] = draw.choice(
                    ['"%s"', "(%s)", "*%s*", "_%s_", "%s,", "%s;", "%s-%s"]
                ).replace("%s", words[i])
        out += " ".join(words) + draw.choice(
            [". ", ". ", "! ", "? ", "...  ", ".\n", ".\n\n", ".\r\n"]
        )
    return out


def code(bytes_wanted):
    out = ""
    while len(out) < bytes_wanted:
        indent = draw.choice(["", "  ", "    ", "\t", "\t\t", "        "])
        a, b, c = word(), word(), word()
        n = draw.randint(0, 70000)
        out += (
            indent
            + draw.choice(
                [
                    f"for (int {a[0]} = 0; {a[0]} < {n}; ++{a[0]}) {{",
                    f"auto {a} = {b}->{c}({n}, 0x{n:x});",
                    f"template <class T, size_t {a.upper()}>",
                    f"if (!{a} && {b}[{n % 10}] != '\\n') return {c};",
                    f"// {a} {b}: {c}'s {n}",
                    f"std::vector<{a}_t> {b}{n % 7}_{c};",
                    "}",
                    "};",
                    "#include <%s.h>" % a,
                    f"{a} <<= {n % 32}u; {b} /= {n / 97:.3f}f;",
                ]
            )
            + draw.choice(["\n", "\n", "\r\n", "  \n", "\n\n"])
        )
    return out


def numbers(bytes_wanted):
    out = ""
    digits = [
        "0123456789",
        "٠١٢٣٤٥٦٧٨٩",
        "०१२३४५६७८९",
        "０１２３４５６７８９",
        "ⅠⅡⅢⅣⅤⅥⅦⅧ",
        "¼½¾²³¹⁴₅",
        "〇①②㉑𝟘𝟙",
    ]
    while len(out.encode()) < bytes_wanted:
        kind = draw.choice([digits[0]] * 6 + digits)
        out += "".join(draw.choice(kind) for _ in range(draw.choice([1, 2, 3, 4, 5, 7, 12])))
        out += draw.choice(
            [" ", " ", ".", ",", "e", "a", "%", "\n", "  ", "-", "'", "'s", " ٣", ""]
        )
    return out


def scripts(bytes_wanted):
    ranges = [
        (0xC0, 0x17F),
        (0x370, 0x3FF),
        (0x400, 0x4FF),
        (0x5D0, 0x5EA),
        (0x620, 0x65F),
        (0x904, 0x94D),
        (0xE01, 0xE4E),
        (0x3041, 0x30FF),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0x10400, 0x1044F),
        (0x20000, 0x2A6DF),
        (0x1E00, 0x1EFF),
        (0x2200, 0x22FF),
    ]
    out = ""
    while len(out.encode()) < bytes_wanted:
        first, last = draw.choice(ranges)
        out += "".join(
            chr(draw.randint(first, min(last, first + 200))) for _ in range(draw.randint(1, 8))
        )
        if draw.random() < 0.2:
            out += "e" + "".join(chr(draw.randint(0x300, 0x36F)) for _ in range(draw.randint(1, 4)))
        out += draw.choice([" ", " ", "\u3002", "\u3001", "\u3000", "\u00a0", "\n", "", " a"])
    return out


def emoji(bytes_wanted):
    pieces = [
        "\U0001f600",
        "\U0001f469\u200d\U0001f4bb",
        "\U0001f44d\U0001f3fd",
        "\u2764\ufe0f",
        "\U0001f1e9\U0001f1ea",
        "1\ufe0f\u20e3",
        "\U0001fae8",
        "\u2603",
        "\U0001f3f4\u200d\u2620\ufe0f",
    ]
    out = ""
    while len(out.encode()) < bytes_wanted:
        out += draw.choice(pieces) * draw.choice([1, 1, 2]) + draw.choice(
            ["", " ", "ok", "  ", "!"]
        )
    return out


def spaces(bytes_wanted):
    out = ""
    while len(out.encode()) < bytes_wanted:
        out += "".join(
            draw.choice(SPACES + [" ", "\n", "\r\n"] * 4) for _ in range(draw.randint(1, 5))
        )
        out += draw.choice(
            ["a", "Bo", "7", "12345", ".", "++", "'s", "é", "\u0301", ""] + list(NO_SPACES)
        )
    return out


def patterns(bytes_wanted):
    alphabet = list("   '''aAsStTlLrReEvVmMdD19.!-\n\n\r\t") + [
        "\u00a0",
        "é",
        "\u0301",
        "\u017f",
        "²",
        "\u2028",
        "漢",
        "\u200b",
    ]
    out = ""
    while len(out.encode()) < bytes_wanted:
        out += "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 12)))
    return out


def borders():
    codes = set()
    for category in "LN":
        for first, last in ranges_of(category):
            codes |= {first - 1, first, last, last + 1}
    out = ""
    for c in sorted(codes - TOO_NEW):
        if not 0xD800 <= c <= 0xDFFF:
            out += chr(c) + draw.choice(["", " ", "a", " a", "1", "."])
    return out


def added(tokens):
    parts = [word() for _ in range(20)] + [
        "",
        " ",
        "  ",
        "\n",
        "'s",
        "<|",
        "|>",
        "<|endoftext",
        "1 ",
    ]
    return "".join(draw.choice(parts) + draw.choice(tokens) for _ in range(400))


def make_text():
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved|>",
        "<|reserved|>more",
        "twice",
        "<file sep>",
    ]
    blocks = [
        prose(30000),
        code(25000),
        numbers(10000),
        prose(20000),
        scripts(25000),
        spaces(20000),
        emoji(6000),
        borders(),
        patterns(40000),
        added(tokens),
        prose(10000),
        "no end " * 3 + "  ",
    ]
    return "".join(blocks)


def added_token(id, content, normalized, special=True):
    return {
        "id": id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


def byte_level(**changes):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **changes}


def train(text, pre_tokenizer, specials):
    tokenizer = Tokenizer(models.BPE())
    shell = json.loads(tokenizer.to_str())
    shell["pre_tokenizer"] = pre_tokenizer
    tokenizer = Tokenizer.from_str(json.dumps(shell))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=specials,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return json.loads(tokenizer.to_str())


def gpt2(text):
    file = train(text, byte_level(), [])
    vocab, merges = file["model"]["vocab"], file["model"]["merges"]
    vocab["<|endoftext|>"] = len(vocab)
    file["added_tokens"] = [added_token(vocab["<|endoftext|>"], "<|endoftext|>", True)]
    file["post_processor"] = byte_level(add_prefix_space=True, trim_offsets=False)
    file["decoder"] = byte_level(add_prefix_space=True)
    file["model"] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "vocab": vocab,
        "merges": [" ".join(m) for m in merges],
    }
    return file


def smollm(text):
    digits = {"type": "Digits", "individual_digits": True}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved|>", "<|reserved|>more"]
    file = train(
        text, {"type": "Sequence", "pretokenizers": [digits, byte_level(use_regex=True)]}, specials
    )
    vocab = file["model"]["vocab"]  # "twice" is in it: merges make it too
    file["added_tokens"] += [
        added_token(vocab["twice"], "twice", True, False),
        added_token(len(vocab), "<file sep>", False, False),
    ]
    file["decoder"] = byte_level(add_prefix_space=True, use_regex=True)
    return file


def llama3(text):
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    file = train(
        text, {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]}, []
    )
    vocab = file["model"]["vocab"]
    # Words that no merge makes: ignore_merges finds them nevertheless.
    for token in ["Ġjukalo", "verwaexyo", "++", "<|", "ĠĠĊ"]:
        vocab.setdefault(token, len(vocab))
    file["model"]["ignore_merges"] = True
    n = len(vocab)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved|>", "<|reserved|>more"]
    file["added_tokens"] = [added_token(n + i, name, False) for i, name in enumerate(names)]
    start = {"SpecialToken": {"id": names[0], "type_id": 0}}
    a, b = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [start, a],
        "pair": [start, a, start, b],
        "special_tokens": {names[0]: {"id": names[0], "ids": [n], "tokens": [names[0]]}},
    }
    file["post_processor"] = {
        "type": "Sequence",
        "processors": [
            byte_level(add_prefix_space=True, trim_offsets=False, use_regex=True),
            template,
        ],
    }
    file["decoder"] = byte_level(add_prefix_space=True, use_regex=True)
    return file


def main():
    here = pathlib.Path(__file__).resolve().parent
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "tokenizers"
    out.mkdir(parents=True, exist_ok=True)
    text = make_text()
    (out / "text.txt").write_bytes(text.encode())
    expected = {}
    for make in (gpt2, smollm, llama3):
        name = make.__name__
        file = json.dumps(make(text), ensure_ascii=False, separators=(",", ":"))
        (out / f"{name}.json").write_text(file)
        tokenizer = Tokenizer.from_str(file)
        expected[name] = tokenizer.encode(text).ids
        assert tokenizer.decode(expected[name], skip_special_tokens=False).endswith(text)
        print(name, tokenizer.get_vocab_size(), "tokens,", len(expected[name]), "ids")
        if name == "gpt2":  # what add_prefix_space does, also behind added tokens
            spaced = Tokenizer.from_str(
                file.replace('"add_prefix_space":false', '"add_prefix_space":true')
            )
            parts = ["Hello", "you", " there", "\nand", "", ""]
            end = "<|endoftext|>".join(parts)
            (out / "prefix.txt").write_text(end)
            expected["gpt2_prefix"] = spaced.encode(end).ids
            expected["gpt2_prefix_of_nothing"] = spaced.encode("").ids
    save_file(
        {k: numpy.array(v, numpy.uint16) for k, v in expected.items()}, out / "expected.safetensors"
    )


if __name__ == "__main__":
    main()
