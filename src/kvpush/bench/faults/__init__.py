"""The fault matrix: what becomes of one request when anything goes wrong at any moment of its transfer.

Real are the endpoints, the transfer threads' loops, the faulty transport and the bytes; simulated are the clock, the
control links' wires and the two engines' schedulers, so that hundreds of faults take seconds, and the same each time.
"""
