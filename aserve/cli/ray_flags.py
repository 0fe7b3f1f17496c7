"""The flags of `aserve ray` besides those of `aserve serve`: each sets the field of its name of `RayOptions`."""

from typing import Final

from aserve.cli.flags import Flag
from aserve.cli.words import read_bool, read_count, read_number, read_seconds, read_text

RAY_FLAGS: Final = (
    Flag("replicas", read_count, "N", "of them, always (if not given: 1, or between the next two)"),
    Flag("min_replicas", read_count, "N", "of them at least, more as the load asks for them"),
    Flag("max_replicas", read_count, "N", "of them at most"),
    Flag("replica_cpus", read_number, "X", "cores that a replica reserves, and computes with; by rank, if it is split"),
    Flag("replica_gpus", read_number, "X", "GPUs that it reserves (if not given: one by rank with --device cuda)"),
    Flag(
        "address",
        read_text,
        "ADDRESS",
        "of a Ray cluster that runs (if not given: the one that RAY_ADDRESS names or that runs here, else a new one)",
    ),
    Flag("ray_app", read_text, "NAME", "the application's name in Serve"),
    Flag("ray_route", read_text, "PATH", "the path that it is served below"),
    Flag("target_wait", read_seconds(0.01), "SECONDS", "that waiting tokens may take, by measured tokens a second"),
    Flag("scale_up_after", read_seconds(), "SECONDS", "that they have to take longer before there is a replica more"),
    Flag("scale_down_after", read_seconds(), "SECONDS", "that fewer would do before there is a replica less"),
    Flag("retries", read_count, "N", "other replicas that a request is sent to if one is gone, draining or full"),
    Flag("haproxy", read_bool, "", "with a new cluster: HAProxy for Serve's proxy, faster, and on all interfaces"),
    Flag("dashboard", read_bool, "", "start Ray's dashboard with a new cluster"),
    Flag("detach", read_bool, "", "leave the application running, and end"),
)
