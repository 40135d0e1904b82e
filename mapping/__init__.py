"""Where the elements of a checkpoint lie in somebody's own tensors: an engine's model, a trainer's shards.

Both are learned once from the owner's own code, which is followed and not carried out. What is not plainly a move of
elements is found and named.
"""
