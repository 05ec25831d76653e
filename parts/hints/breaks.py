"""breaks.py: a backslash and an n on the command line are a line break."""
import os
import re

from errors import tell

TEXTS = ("prompt_template", "system", "stop")  # flags whose words the model reads or writes
# A backslash with n, r or t, except at the beginning of a word of LaTeX, and except after another
# backslash. Of the many words with t and r each one counts.
LATEX = ("ne|neq|neg|nu|nabla|not|notin|ni|nmid|nleq|ngeq|nexists|newline|newcommand|nonumber|"
         "nolimits|nparallel|nsubseteq|nearrow|nwarrow|natural|normalsize")
BREAK = re.compile(rf"(?<!\\)\\(?:(?!(?:{LATEX})(?![A-Za-z]))(n)|([rt])(?![A-Za-z]))")

SIGNS = {"n": "\n", "r": "\r", "t": "\t"}


def with_breaks(words: list[str]) -> list[str]:
    """Returns the words of a command line. In the values of TEXTS a backslash and an n, which a
    shell passes on as they are, become a line break (r, t: as in Python); it prints which."""
    found, name = [], ""
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        name = flag[2:].replace("-", "_") if flag else name
        read = BREAK.sub(lambda match: SIGNS[match[1] or match[2]], value)
        if name in TEXTS and read != value:
            word = flag + equals + read
            if os.environ.get("RANK", "0") == "0":
                tell(f"--{name}: a backslash with n, r or t is a line break or a tab: {read!r}")
        found.append(word)
    return found
