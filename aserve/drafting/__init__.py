"""Who guesses tokens for steps to verify: each proposer a file, behind `core.ports.Proposer`."""
