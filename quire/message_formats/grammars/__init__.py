"""The grammars that calls follow: one collects the rules, the others write parts of them."""
