"""Chat templates that would take for ever, all memory, or more than a prompt may.

python tests/hostile_templates.py      # renders each, and prints the seconds and the memory that it took
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from eagle_runtime import TemplateError
from eagle_runtime.text.tokenizer import Text

HOSTILE = {  # R stands for many turns
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "loops over a list": "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a recursive loop": "{% for x in [1,2] recursive %}{% if loop.depth < 50 %}{{ loop([1,2]) }}{% endif %}"
    "{% endfor %}",
    "a block in itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "text times a number": "{{ 'x' * 10000000000 }}",
    "a list times a number": "{{ [0] * 10000000000 }}",
    "a power": "{{ 2 ** 100000000000 }}",
    "powers": "{% set ns = namespace(x=2) %}{% for i in R %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling with ~": "{% set ns = namespace(x='x') %}{% for i in R %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling with +": "{% set ns = namespace(x='x') %}{% for i in R %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by a block": "{% set ns = namespace(x='x') %}{% for i in R %}{% set ns.x %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% endfor %}",
    "a width of a filter": "{{ 'x' | center(10000000000) }}",
    "a width of a method": "{{ 'x'.ljust(10000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "a width given to %": "{{ '%*d' | format(1000000000, 1) }}",
    "much text many times": "{{ ('%s' * 50000) % ('x' * 8000000) }}",
    "replaced by much": "{{ ('a' * 5000000) | replace('a', 'b' * 5000000) }}",
    "replaced nothing by much": "{{ ('a' * 5000000).replace('', 'b' * 5000000) }}",
    "a range": "{{ range(10000000000) }}",
    "long text in a loop": "{% for i in range(99999) %}" + "y" * 60_000 + "{% endfor %}",
    "long text in a block": "{% set x %}{% for i in range(99999) %}" + "y" * 60_000 + "{% endfor %}{% endset %}",
    "long text in a macro": "{% macro m() %}{% for i in range(99999) %}" + "y" * 60_000 + "{% endfor %}{% endmacro %}"
    "{{ m() | length }}",
    "brackets": "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}",
    "statements in statements": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a long sum": "{{ 1" + " + 1" * 30_000 + " }}",
    "too long itself": "x" * 300_000,
    "another template": "{% include 'x' %}",
    "Python's insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "many lists at a time": "".join(f"{{% set a{i} = range(90000) | map('string') | list %}}" for i in range(99)),
    "words": "{{ ('ab ' * 2700000).split() }}",
    "pieces": "{{ ('ab,' * 2700000).split(',') }}",
    "lines": "{{ ('ab\n' * 2700000).splitlines() }}",
    "characters as a list": "{{ ('a' * 8000000) | list }}",
    "characters joined": "{{ ('a' * 8000000) | join(', ') }}",
    "escapes": "{{ ('&' * 8000000) | escape }}",
    "escapes of addresses": "{{ ('😀' * 2000000) | urlencode }}",
    "an endless number": "{{ ('9' * 8000000) | int(base=16) }}",
    "names": "".join(f"{{{{ a{i} }}}}" for i in range(12_000)),
    "ranges of ranges": "{{ range(99999) | map('batch', 99999) | list }}",
}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def text_of(folder: Path, template: str) -> Text:
    """Returns the text files of a folder with this template. R stands for many turns."""
    (folder / "chat_template.jinja").write_text(template.replace("in R %", "in range(99) %"), encoding="utf-8")
    return Text(folder)


def peak() -> int:
    """Returns the most memory in bytes that this process had. On Linux getrusage would also count the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    """Renders each; prints one line of JSON: name -> [refused, seconds of processor time, megabytes of the peak above
    the memory at the start]."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(TemplateError):
            text_of(Path(folder), "{{ messages }}").render(CHAT)  # what has to be imported
        before = peak()
        for name, template in HOSTILE.items():
            text, begun, refused = text_of(Path(folder), template), time.thread_time(), False
            try:
                text.render(CHAT)
            except TemplateError:
                refused = True
            seconds = time.thread_time() - begun
            figures[name] = [refused, round(seconds, 3), (peak() - before) // 1_000_000]
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
