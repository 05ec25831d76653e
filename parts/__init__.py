"""parts/: what most runs do not use, one folder each. A run that uses no part enters no line of it.
CONTRIBUTING.md lists them, seams.py has the lines of the core that name them, strip.py deletes.
"""
