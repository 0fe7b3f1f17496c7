"""What the serving benchmarks share beside the load generator, which is aserve/load: processes, shapes, tables."""
