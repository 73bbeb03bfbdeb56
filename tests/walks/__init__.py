"""The first ten minutes of four people, each written down as one story: what they do, and what they see.

Each step is what such a person would try next. What they see is quoted, so that a change of it is a change made on
purpose.
"""
