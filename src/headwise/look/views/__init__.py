"""Views of a look: tables, figures, notebook output, the head card."""
