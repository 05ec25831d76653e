"""parts/: what most runs do not use, one folder each. A run that uses no part enters no line of it.
part.py says how they plug in; `rm -r parts/NAME` removes one, whole.
"""
