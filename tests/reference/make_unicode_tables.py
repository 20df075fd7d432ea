"""Writes common/unicode_tables.cpp: which code points are letters and which are numbers.

    pip install unicodedata2==16.0.0
    python make_unicode_tables.py [output file]

The general categories come from the Unicode Character Database through Python's unicodedata (or
unicodedata2, which is the same module with the tables of another Unicode version). Version 16.0 is
what the regular expressions of Hugging Face's tokenizers 0.23 use.
"""

import pathlib
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

HEAD = """// Which code points are letters (general category L*) and which are numbers (N*), as sorted ranges.
// Written by tests/reference/make_unicode_tables.py from Python's unicodedata, Unicode {version}.
// The data is the Unicode Character Database's (https://www.unicode.org/ucd).

#include "common/unicode.h"

namespace lockstep {{
"""


def ranges_of(category):
    ranges = []
    for code in range(0x110000):
        if unicodedata.category(chr(code))[0] != category:
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def table(name, ranges):
    lines, line = [], "   "
    for first, last in ranges:
        item = f" {{0x{first:x}, 0x{last:x}}},"
        if len(line) + len(item) > 100:
            lines.append(line)
            line = "   "
        line += item
    body = "\n".join(lines + [line])
    return f"""
std::span<const CodeRange> {name}() {{
  // clang-format off
  static constexpr CodeRange kRanges[] = {{
{body}
  }};
  // clang-format on
  return kRanges;
}}
"""


def main():
    here = pathlib.Path(__file__).resolve().parent
    default = here.parents[1] / "common" / "unicode_tables.cpp"
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    text = HEAD.format(version=unicodedata.unidata_version)
    text += table("unicode_letters", ranges_of("L"))
    text += table("unicode_numbers", ranges_of("N"))
    out.write_text(text + "\n}  // namespace lockstep\n")


if __name__ == "__main__":
    main()
