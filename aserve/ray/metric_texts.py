"""merged: metrics of several replicas as one text, each sample with its replica's name as a label.

Prometheus wants the samples of one metric together, and its HELP and TYPE once; which samples are one metric's, the
texts tell by their order. What the samples say is not looked at.
"""

from collections.abc import Iterable, Iterator

LABEL = "replica"


def merged(texts: Iterable[tuple[str, str]]) -> str:
    """One text of those of replicas, by name. texts: in Prometheus' text format, as prometheus_client writes it."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts:
        for family, line in _lines(text):
            if line.startswith("#"):
                kept = comments.setdefault(family, [])
                if line not in kept and len(kept) < 2:
                    kept.append(line)
            else:
                samples.setdefault(family, []).append(labelled(line, replica))
    families = dict.fromkeys((*comments, *samples))
    lines = [line for family in families for line in (*comments.get(family, ()), *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines)


def labelled(sample: str, replica: str) -> str:
    """A sample with the label in front of its others. Values of labels may have braces in them; names have none."""
    value = replica.replace("\\", r"\\").replace('"', r"\"")
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        rest = sample[brace + 1 :]
        comma = "" if rest.startswith("}") else ","
        return f'{sample[:brace]}{{{LABEL}="{value}"{comma}{rest}'
    return f'{sample[:space]}{{{LABEL}="{value}"}}{sample[space:]}'


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the name of the family that it is of: the one that the last comment named."""
    family = ""
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            family = line.split(" ", 3)[2]
        elif not line or line.startswith("#"):
            continue
        yield family, line
