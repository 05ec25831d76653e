"""Published runs, a file a job: README.md. collect.py makes a file, table.py the tables."""
