(() => {
  const filter = document.getElementById("filter");
  const examples = [...document.querySelectorAll("article.example")];
  const count = document.getElementById("count");
  const show = () => {
    const wanted = filter.querySelector("input:checked").value;
    let shown = 0;
    for (const example of examples) {
      const visible = wanted === "all" || example.classList.contains(wanted);
      example.hidden = !visible;
      shown += visible;
    }
    count.textContent = `${shown} of ${examples.length} shown`;
  };
  const asked = filter.querySelector(`input[value="${location.hash.slice(1)}"]`); // report.html#wrong
  if (asked) asked.checked = true;
  filter.hidden = false;
  filter.addEventListener("change", show);
  show();
})();
