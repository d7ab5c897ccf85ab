"""The program fuzzer: generates whole Python programs and compares how they run natively and interpreted.

grammar/ holds the generator, one file a family of syntax; prelude.py the classes with visible effects that programs
use; compare.py is the oracle; reach.py counts what was executed; faults.py breaks the machine on purpose;
run.py is `make fuzz`. Nothing here needs torch: tests/capture/ sends the same programs through @capture.
"""
