"""Generator of the training and evaluation text of models/glm5-tiny.

Everything is composed from the word lists and grammars in this package; no text is downloaded.
Callers: pretokenise and training workers (stream.py), eval items (evalset.py), tests/tiny.
Invariant: an item whose key hashes into the held-out share never enters the training stream.
"""
