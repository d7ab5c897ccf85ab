"""The report: records that capture writes, and their forms for people (terminal text, HTML) and programs (JSON).

What may live here: plain records and their rendering. Nothing here captures, lowers or runs anything.
"""
