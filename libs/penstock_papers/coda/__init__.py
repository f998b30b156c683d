"""CODA (HPCA '22): resource arrays with borrowing, and dominant resource fairness inside each."""
