"""What a job needs: tiers over what finished runs used, and the bounds on them."""
