"""Fencing tokens (LAW 4): (epoch of the log, ledger seq) as one integer, so that a node compares two of them as numbers.

The epoch rises when an operator accepts a ledger that has lost records: seqs that were given out before are then given out
again, but no token is. In epoch 0, in which every ledger begins, a token is the seq.
"""

SEQ_BITS = (
    40  # 10^12 records; with the epoch a token stays below 2^53, which JSON and JavaScript hold exactly
)
MAX_EPOCH = (1 << 53 - SEQ_BITS) - 1


def token_of(epoch: int, seq: int) -> int:
    """Of what the record `seq` decides in this epoch."""
    return epoch << SEQ_BITS | seq


def seq_of(token: int) -> int:
    """The record that decided it."""
    return token & (1 << SEQ_BITS) - 1
