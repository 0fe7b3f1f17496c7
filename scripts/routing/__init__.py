"""Simulated replicas, recorded and made-up requests, and the policies that simulate_routing.py compares."""
