"""What a rendering is charged: by each character and item that an expression reads or makes, and up to which bound."""

import time

import pytest
from markupsafe import Markup

from aserve.text.template_budget import MAX_CPU_S, MAX_INT_BITS, MAX_STEPS, STEPS_PER_LOOK, Budget, TemplateLimitError
from aserve.text.template_sandbox import TemplateSandbox

BYTES = {
    # Operators: what they compare, and what they make
    "s ~ 1": 1,
    "s ~ 'a' ~ s": 2,
    "u ~ 'a'": 4,
    "s == s": 2,
    "s == u": 5,
    "s == 'a'": 0,
    "'a' == s": 0,
    "1 == 2 == s": 0,
    "'a' in s": 1,
    "s not in ['b']": 0,
    "1 in t": 8,
    "n in t": 8,
    "t < t": 16,
    "big == big": 2,
    "nested == nested": 2,
    "s + s": 2,
    "t + t": 16,
    "t * 3": 24,
    "t * 0": 0,
    "t * -1": 0,
    "3 * u": 12,
    # Slices, keys and literals
    "s[1:]": 1,
    "t[1:]": 8,
    "s[0]": 0,
    "(s ~ 'a')[1:]": 2,
    "(s ~ 'a')[0]": 1,
    "d[s]": 1,
    "[s, 1]": 1,
    "(1, s)": 1,
    "[[s]]": 2,
    "[1, 2]": 0,
    "[s ~ 'a']": 2,
    "{'a': s}": 1,
    "{s: 1}": 1,
    "{s ~ 'a': 1}": 3,
    "{'a': [s]}": 2,
    # Formats: each field may be any of the values
    "'%s' % s": 1,
    "'%s%s' % (s, s)": 6,
    "'{}{}'.format(s, s)": 8,
    # Filters and methods of texts
    "s | upper": 2,
    "s.upper()": 2,
    "u | upper": 20,
    "u.casefold()": 20,
    "s | title": 65,
    "s.title()": 66,
    "s | indent": 65,
    "s | trim": 2,
    "s.startswith(s)": 2,
    "s is lower": 1,
    "words | replace(' ', 'bcd')": 9,
    "words.replace(' ', 'bcd')": 9,
    "words.split()": 37,
    "words.split('a')": 37,
    "words.splitlines()": 33,
    # Filters and methods of lists
    "t | list": 40,
    "range(n) | list": 40,
    "t | sort": 48,
    "range(n) | sort": 40,
    "t.copy()": 16,
    "t.count(1)": 16,
    "d.items()": 16,
    "d.get(s)": 9,
    "dict(d)": 84,
    "1 is in(t)": 8,
    "texts | join": 10,
    "texts | join(',')": 11,
    "','.join(texts)": 11,
    "t | tojson": 11,
    "t | tojson(indent=1)": 80,
}
"""For each character or item of its variable more."""
STEPS = {
    "{% for x in t %}{% endfor %}": 3,
    "{% for x in t %}{{ n }}{% endfor %}": 6,
    "{% for x in t %}{% for y in [1] %}{% endfor %}{% endfor %}": 7,
    "{% macro f() %}{{ varargs | length }}{% endmacro %}{{ f(*t) }}": 1,
    "{% macro f() %}{{ kwargs | length }}{% endmacro %}{{ f(**d) }}": 1,
    "{% set x = 1 in t %}": 4,
    "{% set x = t | list %}": 1,
    "{% set x = t | sort %}": 37,
    "{% set x = t | map('string') | list %}": 47,
    "{% set x = texts | join %}": 6,
}


def spent(source, size):
    """Steps and bytes of a rendering, with texts and lists of that size."""
    sandbox = TemplateSandbox(2**24)
    compiled = sandbox.compile_template(source)
    variables = {
        "n": size,
        "s": "a" * size,
        "u": "é" * size,
        "words": "a " * (size // 2),
        "t": [0] * size,
        "d": {str(key): 0 for key in range(size)},
        "texts": ["ab"] * size,
        "big": [["a" * size]],
        "nested": {"k": ("a" * size,)},
    }
    sandbox.render(compiled, variables)
    budget = sandbox._budget
    return MAX_STEPS - budget._steps_left, budget._max_bytes - budget._bytes_left


@pytest.mark.parametrize("expression", BYTES)
def test_each_character_or_item_costs_its_bytes(expression):
    source = "{% set x = " + expression + " %}"
    assert spent(source, 2000)[1] - spent(source, 1000)[1] == 1000 * BYTES[expression]


@pytest.mark.parametrize("source", STEPS)
def test_each_turn_or_item_costs_its_steps(source):
    assert (spent(source, 2000)[0] - spent(source, 1000)[0]) // 1000 == STEPS[source]


def refuses(charge, *arguments):
    try:
        charge(*arguments)
    except TemplateLimitError as error:
        return str(error)
    return None


def test_all_that_there_is_may_be_spent_and_no_more():
    assert refuses(Budget(1000).spend, 1, 1000) is None
    assert refuses(Budget(1000).spend, 1, 1001) == "it makes over 1000 bytes on the way"
    assert refuses(Budget(1000).spend, MAX_STEPS) is None
    assert refuses(Budget(1000).spend, MAX_STEPS + 1) == f"it takes over {MAX_STEPS} steps"
    assert refuses(Budget(10**10).spend, 1, 100 * MAX_STEPS) == f"it takes over {MAX_STEPS} steps", (
        "bytes take time too"
    )
    used = Budget(1000)
    used.spend(MAX_STEPS - 10, 1000)
    used.refill()
    assert refuses(used.spend, MAX_STEPS, 0) is None
    assert refuses(used.spend, 0, 1000) is None


def test_integers_have_so_many_bits_at_most():
    assert refuses(Budget(1000).check_int, MAX_INT_BITS) is None
    assert refuses(Budget(1000).check_int, MAX_INT_BITS + 1) is not None


def test_a_rendering_that_is_slow_is_stopped_by_the_clock(monkeypatch):
    now_s = 1.0
    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    budget = Budget(1000)
    for now_s in (1.0, 1.0 + MAX_CPU_S):  # noqa: B007  that the clock reads
        assert refuses(budget.spend, STEPS_PER_LOOK + 1) is None
    now_s = 1.01 + MAX_CPU_S
    assert refuses(budget.spend, 1) is None, "it is looked at now and then"
    assert refuses(budget.spend, STEPS_PER_LOOK + 1) == f"it takes over {MAX_CPU_S} s"


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        ("a" * 100, 100),
        ("é" * 100, 400),
        (Markup("a" * 100), 200),
        ([0] * 10, 80),
        ([["a" * 100], "b" * 100], 16 + 8 + 200),
        ({"a" * 100: ["b" * 50]}, 8 + 100 + 8 + 50),
        ({"a": 1}.items(), 8 + 16 + 1),
        (12345, 0),
        (None, 0),
    ],
)
def test_all_that_a_value_holds_is_weighed(value, num_bytes):
    budget = Budget(1000)
    assert budget.weigh(value) is value
    assert budget._max_bytes - budget._bytes_left == num_bytes
