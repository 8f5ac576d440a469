"""What several packages of this repository share, one job a module. Private: names here may change
at any time.
"""
