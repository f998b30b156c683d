"""Fencing tokens (LAW 4): (epoch of the log, ledger seq) as one integer, so that a node compares two of them
as numbers.

The epoch rises when an operator accepts a ledger that has lost records: seqs of the lost records are then
assigned again, but tokens are not repeated. In epoch 0, in which every ledger begins, a token is the seq.
"""

SEQ_BITS = (
    40  # 10^12 records; with the epoch a token stays below 2^53, which JSON and JavaScript hold exactly
)
MAX_EPOCH = (1 << 53 - SEQ_BITS) - 1


def token_of(epoch: int, seq: int) -> int:
    """Token of the decisions of record `seq` in this epoch."""
    return epoch << SEQ_BITS | seq


def seq_of(token: int) -> int:
    """Seq of the record with the decision."""
    return token & (1 << SEQ_BITS) - 1
