{{/* Labels that select the operator's pods; they never change, because a Deployment's selector cannot. */}}
{{- define "prfaas.selectorLabels" -}}
app.kubernetes.io/name: prfaas
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* Labels of every object of this chart. */}}
{{- define "prfaas.labels" -}}
{{ include "prfaas.selectorLabels" . }}
app.kubernetes.io/part-of: prfaas
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
