"""Replicas from a program of one's own: python examples/ray/program.py, on a cluster or a machine with aserve[ray]."""

from ray import serve

from aserve.core.config import Options
from aserve.ray import app
from aserve.ray.options import RayOptions


def main() -> None:
    options = Options(model="demo", max_num_seqs=32)
    serve.run(app(options, RayOptions(min_replicas=1, max_replicas=2)), name="aserve", blocking=True)


if __name__ == "__main__":
    main()
