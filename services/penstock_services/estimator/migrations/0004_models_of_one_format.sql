-- Models of earlier, unreleased formats cannot be read any more; the next training replaces them.

DELETE FROM models;
