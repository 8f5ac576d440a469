"""Learning to rank from files of query groups: SOPRC compared with listwise losses of rax."""
