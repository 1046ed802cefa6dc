"""Text for language models: files of documents -> token shards -> rows of fixed length.

    documents.py  what is in a file: .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet
    shards.py     files of token ids on disk, built once, memory-mapped
    rows.py       rows of T tokens for training, with the documents packed one after another

`python -m experiments.prepare_text` builds shards; `experiments.lm` does it where they are missing.
"""
